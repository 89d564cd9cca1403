"""What a linear layer with a LoRA adapter means, in plain torch.

M rows, N output features, C input features, R adapter rank; weight dense [N, C], or NF4 codes with their absmax.
"""

import torch
from torch import Tensor

from ..nf4.spec import backward as nf4_backward
from ..nf4.spec import forward as nf4_forward


def forward(
    x: Tensor, weight: Tensor, absmax: Tensor | None, block_size: int, bias: Tensor | None, lora_a: Tensor,
    lora_b: Tensor, scale: float, keep: Tensor | None, dropout_p: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [..., C] -> y [..., N] = x W^T + bias + scale * dropout(x) A^T B^T, and xa = dropout(x) A^T [rows, R].

    With `rows` (int64, distinct, into the flattened leading dimensions) only those rows get the adapter's part.
    """
    D, acc = _dtypes(x, lora_a, lora_b)
    y = base_forward(x, weight, absmax, block_size, bias, lora_b.shape[0], lora_a.shape[1])
    h = _masked(_pick(x, rows), _pick(keep, rows))
    xa = (inverse_keep(keep, dropout_p) * (h.to(D).to(acc) @ lora_a.to(acc).t())).to(D)
    delta = scale * (xa.to(acc) @ lora_b.to(acc).t())
    flat = y.reshape(-1, y.shape[-1]) if y.shape[-1] else y.new_empty(y.shape[:-1].numel(), 0)
    if rows is None:
        flat = (flat.to(acc) + delta).to(y.dtype)
    else:
        flat = flat.index_copy(0, rows, (flat[rows].to(acc) + delta).to(y.dtype))
    return flat.view(y.shape), xa


def backward(
    d_y: Tensor, x: Tensor | None, weight: Tensor, absmax: Tensor | None, block_size: int, lora_a: Tensor,
    lora_b: Tensor, xa: Tensor | None, scale: float, keep: Tensor | None, dropout_p: float, rows: Tensor | None,
    need_x: bool, need_w: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_y [..., N] -> d_x, d_W, d_A, d_B; an empty tensor for each that is not needed.

    With g = d_y B:  d_x = d_y W + scale * dropout'(g A),  d_A = scale * g^T dropout(x),  d_B = scale * d_y^T xa.
    """
    D, acc = _dtypes(d_y, lora_a, lora_b)
    N, C = lora_b.shape[0], lora_a.shape[1]
    inverse = inverse_keep(keep, dropout_p)
    d_rows = _pick(d_y, rows).to(D).to(acc)
    g = (d_rows @ lora_b.to(acc)).to(D).to(acc)
    d_x = d_w = d_a = d_b = d_y.new_empty(0)
    if need_x:
        d_x = base_backward(d_y, weight, absmax, block_size, N, C)
        delta = scale * inverse * _masked(g @ lora_a.to(acc), _pick(keep, rows))
        flat = d_x.reshape(d_x.shape[:-1].numel(), C)
        if rows is None:
            flat = (flat.to(acc) + delta).to(d_x.dtype)
        else:
            flat = flat.index_copy(0, rows, (flat[rows].to(acc) + delta).to(d_x.dtype))
        d_x = flat.view(d_x.shape)
    if need_w:
        assert x is not None
        d_w = (_pick(d_y, None).to(acc).t() @ _pick(x, None).to(acc)).to(weight.dtype)
    if need_a:
        h = _masked(_pick(x, rows), _pick(keep, rows)).to(D).to(acc)
        d_a = (scale * inverse * (g.t() @ h)).to(lora_a.dtype)
    if need_b:
        assert xa is not None
        d_b = (scale * (d_rows.t() @ xa.to(acc))).to(lora_b.dtype)
    return d_x, d_w, d_a, d_b


def base_forward(
    x: Tensor, weight: Tensor, absmax: Tensor | None, block_size: int, bias: Tensor | None, N: int, C: int
) -> Tensor:
    if absmax is not None:
        return nf4_forward(x, weight, absmax, bias, N, C, block_size)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def base_backward(d_y: Tensor, weight: Tensor, absmax: Tensor | None, block_size: int, N: int, C: int) -> Tensor:
    return d_y @ weight if absmax is None else nf4_backward(d_y, weight, absmax, N, C, block_size)


def inverse_keep(keep: Tensor | None, dropout_p: float) -> float:
    """1 / (1 - p) where a mask is given; everything is dropped at p = 1."""
    if keep is None:
        return 1.0
    return 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


def _dtypes(x: Tensor, lora_a: Tensor, lora_b: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(the adapter's dtype, the accumulator's)."""
    D = torch.promote_types(lora_a.dtype, lora_b.dtype)
    return D, torch.promote_types(torch.promote_types(D, x.dtype), torch.float32)


def _pick(t: Tensor | None, rows: Tensor | None):
    """[..., F] -> the flattened rows, or those listed."""
    if t is None:
        return None
    flat = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    return flat if rows is None else flat[rows]


def _masked(t, keep: Tensor | None) -> Tensor:
    return t if keep is None else torch.where(keep, t, torch.zeros((), dtype=t.dtype, device=t.device))
