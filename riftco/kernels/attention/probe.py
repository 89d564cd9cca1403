"""Which backward a run uses: the devices' own, or the composed one where one of them cannot. Asked once, then fixed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from .._contract import Choice, load, own, pinned
from . import composed

OP = "attention_bwd"
COMPOSED = "riftco.kernels.attention.composed:backward"
ROWS = {"cuda": 512}  # long enough for the kernels of long documents; one short tile elsewhere
NMSE = 1e-3  # of 16-bit gradients against the composed ones; a broken kernel is off by far more


def pick(
    devices: Iterable[torch.device | str], dtype: torch.dtype, H: int, K: int, D: int, *, packed: bool = False
) -> Choice:
    """Path "native" if the backward of every device runs for this head shape and agrees with the composed one; else
    path "composed". The reason names the devices, or the one that cannot and why.

    Args:
        devices: all that compute attention in the run.
        dtype: of activations.
        H, K, D: query heads, key heads, head dim.
        packed: whether the run has packed documents.

    Compiles and launches the kernel on a few rows and reads the result back; draws no random numbers.
    """
    places = [torch.device(d) for d in devices]
    for device in places:
        if reason := _why_not(device, dtype, H, K, D, packed):
            return Choice("composed", f"{device}: {reason}")
    names = ", ".join(f"{d} runs {own(OP, d.type, dtype).path}" for d in places)
    return Choice("native", f"{names} for {H} query heads, {K} key heads, head dim {D}, {dtype}")


@contextlib.contextmanager
def attention_backward(
    devices: Iterable[torch.device | str], dtype: torch.dtype, H: int, K: int, D: int, *, packed: bool = False
) -> Iterator[Choice]:
    """Pick the backward of a run, and use it for every attention on these device types until the with-block ends, in
    all threads.

    It is the devices' own if it runs for this head shape and agrees with the composed one (an NMSE of 1e-3 at most),
    else the composed one. Nothing inside changes it: not RIFTCO_IMPL, and a kernel that fails later is an error.

    Args:
        devices: all that compute attention in the run.
        dtype: of activations.
        H, K, D: query heads, key heads, head dim.
        packed: whether the run has packed documents.

    Yields:
        What was picked: `path`, "native" or "composed", and `why`.

    Raises:
        RuntimeError: an enclosing block, or one in another thread, has fixed another implementation.
    """
    places = [torch.device(d) for d in devices]
    choice = pick(places, dtype, H, K, D, packed=packed)
    paths = {}
    for device in places:
        path = COMPOSED if choice.path == "composed" else own(OP, device.type, dtype).path
        paths[device.type] = Choice(path, f"fixed for this run: {choice.path}, {choice.why}")
    with pinned(OP, paths):
        yield choice


def _why_not(device: torch.device, dtype: torch.dtype, H: int, K: int, D: int, packed: bool) -> str:
    """Why `device` has no backward of its own; "" if it has."""
    T = ROWS.get(device.type, 16)

    def made(heads: int, step: float) -> torch.Tensor:
        values = (torch.arange(T * heads * D, dtype=torch.float32) * step).sin()
        return values.to(device, dtype).view(*(() if packed else (1,)), T, heads, D)

    try:
        q, k, v, d_out = made(H, 0.7), made(K, 1.1), made(K, 1.3), made(H, 1.7)
        cu = torch.tensor([0, T], dtype=torch.int32, device=device) if packed else None
        options = (cu, None, None, None, None, None, None, None, 0, 0.0, 0.0)
        out, lse = composed.forward(q, k, v, *options)
        saved = (d_out, None, q, k, v, out, lse, *options, 0, False, True, True, True, False, False)
        native = load(own(OP, device.type, dtype).path)(*saved)
        for name, got, want in zip(("dq", "dk", "dv"), native, composed.backward(*saved)):
            got, want = got.float().cpu(), want.float().cpu()
            error = float((got - want).square().sum() / want.square().sum().clamp(min=1e-30))
            if not error <= NMSE:
                return f"its {name} is off by an NMSE of {error:.1e}"
    except Exception as error:  # whatever a compiler, a driver or a launcher raises is the reason
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
