"""What y = gain * z + bias means, in plain torch; gain [N] in the accumulator's dtype, z and y [..., N]."""

from torch import Tensor


def forward(z: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    y = z.to(gain.dtype) * gain
    return (y if bias is None else y + bias.to(gain.dtype)).to(z.dtype)


def backward(d_y: Tensor, z: Tensor, gain: Tensor, need_z: bool, need_gain: bool) -> tuple[Tensor, Tensor]:
    """d_z = gain * d_y; d_gain = sum over the rows of d_y * z."""
    d_z = d_gain = d_y.new_empty(0)
    up = d_y.to(gain.dtype)
    if need_z:
        d_z = (up * gain).to(d_y.dtype)
    if need_gain:
        d_gain = (up * z.to(gain.dtype)).reshape(-1, gain.shape[0]).sum(0)
    return d_z, d_gain.to(gain.dtype)
