"""Compiles cross-entropy's kernels at the bench's vocabularies: `python compile_losses.py <capability>`.

Prints a line a launch: "<what>: <shared memory> <spilled bytes> <bytes of the loads and stores of a row, joined>".
"""

import functools
import re
import sys
from collections.abc import Callable

import torch
from compile_kernels import compiled, recorded, spilled_bytes

from riftco.kernels.cross_entropy.cuda import Slices, launch

launch._packed = lambda x: x.element_size() == 2  # type: ignore[assignment]  # as on the GPU that this compiles for
PLAIN = (-100, 0.0, 0.0, 0.0, 1.0)
EVERY = (-100, 0.1, 1e-4, 30.0, 0.5)


def both(
    V: int, dtype=torch.bfloat16, options=PLAIN, metrics=False, first: int = 0, behind: int = 0, classes=False
) -> Callable:
    """Loss and gradient in one launch, over the logits, which lie between `first` and `behind` other elements."""

    def call() -> None:
        x = torch.empty(2, first + V + behind, dtype=dtype)[:, first : first + V]
        weight, up = torch.ones(V) if classes else None, torch.ones(()).expand(2)
        launch.forward_backward(x, torch.zeros(2, dtype=torch.int64), None, weight, up, *options, metrics, True)

    return call


def forward(V: int, N: int = 2) -> None:
    launch.forward(
        torch.empty(N, V, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.int64), None, None, *PLAIN, False
    )


def backward(V: int) -> None:
    x, rows = torch.empty(2, V, dtype=torch.bfloat16), torch.empty(2)
    launch.backward(rows, rows, x, torch.zeros(2, dtype=torch.int64), None, None, rows, rows, *PLAIN)


def panels(V: int, width: int) -> None:
    x, n = torch.empty(2 * V, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    parts = [x[2 * lo : 2 * min(lo + width, V)].view(2, -1) for lo in range(0, V, width)]
    up, out = torch.ones(()).expand(2), [torch.empty(2) for _ in range(3)]
    Slices(n, None, None, up, PLAIN, False, True, out).in_panels(parts, 2)


def places(N: int, dtype: torch.dtype, weighted: bool) -> None:
    launch.places(torch.zeros(N, dtype=dtype), torch.ones(N) if weighted else None, -100)


LAUNCHES = {
    "places": lambda: places(8192, torch.int64, False),
    "places, weighted": lambda: places(8191, torch.int32, True),
    **{f"aligned, panels of {w}": functools.partial(panels, 128256, w) for w in (8192, 16384, 24576)},
    "aligned, panels of 32000": lambda: panels(32000, 12288),
    "aligned, panels of 256000": lambda: panels(256000, 24576),
    **{f"aligned {V}": both(V) for V in (24576, 32000, 49152, 65024, 128256, 151936, 262144)},
    "aligned, z_loss and class weights": both(128256, options=(-100, 0.0, 1e-4, 0.0, 1.0), classes=True),
    "aligned, softcap": both(256000, options=(-100, 0.0, 0.0, 30.0, 1.0)),
    "aligned, smoothing": both(128256, options=(-100, 0.1, 0.0, 0.0, 1.0)),
    "aligned, metrics": both(128256, metrics=True),
    "aligned, every option": both(128256, options=EVERY, metrics=True, classes=True),
    "aligned, float16": both(128256, torch.float16),
    "aligned, float32": both(128256, torch.float32),
    "aligned, forward": lambda: forward(128256),
    "aligned, forward of many rows": lambda: forward(32000, 1024),
    "aligned, backward": lambda: backward(128256),
    "aligned rows, odd V": both(50257, behind=47),
    "aligned rows, odd V, long": both(151669, behind=11),
    "aligned rows, odd V, softcap": both(256001, options=(-100, 0.0, 0.0, 30.0, 1.0), behind=63),
    "aligned rows, odd V, every option": both(128257, options=EVERY, metrics=True, classes=True, behind=63),
    "odd V": both(50257),
    "odd start": both(50256, first=1),
    "odd V, every option": both(50257, options=EVERY, metrics=True, classes=True),
}


def widths(ptx: str) -> str:
    """Bytes of the global loads and stores that go through the caches by a hint: those of a row's elements."""
    found = re.findall(r"(?:ld|st)\.global\S*(?:evict_first|evict_last|\.cs)\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    return ",".join(sorted({str(int(n or 1) * int(bits) // 8) for n, bits in found}, key=int))


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for name, call in LAUNCHES.items():
        with recorded() as calls:
            call()
        ((kernel, arguments, options),) = calls
        if "OPAQUE" in arguments:
            arguments["OPAQUE"] = arguments["x_ptr"].element_size() == 2  # these tensors lie on the CPU
        done = compiled(kernel, arguments, options, capability)
        ptx = done.asm["ptx"]
        print(f"{name}: {done.metadata.shared} {spilled_bytes(ptx, capability)} {widths(ptx) or '-'}", flush=True)
