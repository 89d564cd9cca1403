"""Compiles the Gluon kernels that a call would launch on a Hopper GPU that need not be there.

`main(calls)` is for programs that run in a process without TRITON_INTERPRET: it prints one line per kernel: name,
shared memory in bytes, bytes of registers spilled a thread, local-memory instructions in loops that feed the tensor
cores, and ptxas's warnings that it serialises them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import triton
from compile_kernels import TYPES, recorded
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

BIN = f"{triton.__path__[0]}/backends/nvidia/bin"


def build(kernel: JITFunction, arguments: dict, options: dict) -> tuple[int, int, int, int]:
    """(shared memory, spilled bytes, local accesses in the main loops, warnings)."""
    shared, said, sass = assembled(kernel, arguments, options)
    return shared, spilled(said), local_in_loops(sass), len(re.findall(r"\(C75\d\d\)", said))


def spilled(said: str) -> int:
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))


def assembled(kernel: JITFunction, arguments: dict, options: dict) -> tuple[int, str, str]:
    """(shared memory, what ptxas said, SASS)."""
    signature, constants, attributes = {}, {}, {}
    for at, p in enumerate(kernel.params):
        value = arguments.get(p.name, options.get(p.name))
        if p.is_constexpr or value is None:
            signature[p.name], constants[(at,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[p.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[p.name] = "*" + TYPES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = "fp32" if isinstance(value, float) else "i32"
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = f"{folder}/kernel.ptx", f"{folder}/kernel.cubin"
        with open(ptx, "w") as file:
            file.write(done.asm["ptx"])
        command = [f"{BIN}/ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run(
            [f"{BIN}/cuobjdump", "--dump-sass", cubin], capture_output=True, text=True, check=True
        ).stdout
    return done.metadata.shared, said, sass


def local_in_loops(sass: str, longest: int = 1200) -> int:
    """Local loads and stores in the bodies of loops of at most `longest` instructions that contain a wgmma."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    number = {at: n for n, (at, _) in enumerate(code)}
    found: set[int] = set()
    for n, (_at, text) in enumerate(code):
        jump = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        start = number.get(int(jump.group(1), 16)) if jump else None
        if start is None or start >= n or n - start > longest:
            continue
        if any("HGMMA" in body for _, body in code[start:n]):
            found |= {a for a, body in code[start:n] if re.search(r"\b(LDL|STL)\b", body)}
    return len(found)


def main(calls: Callable[[], None]) -> None:
    with recorded() as launches:
        calls()
    for kernel, arguments, options in launches:
        print(kernel.__name__, *build(kernel, arguments, options), flush=True)


def forward(dtype: torch.dtype, D: int, packed: bool, left: int | None, right: int | None, extras: str) -> None:
    from riftco.kernels.attention.cuda.hopper import forward as room

    room._programs = lambda device: 132
    lead = () if packed else (2,)
    q, k = torch.empty(*lead, 256, 4, D, dtype=dtype), torch.empty(*lead, 256, 2, D, dtype=dtype)
    cu = torch.tensor([0, 100, 256], dtype=torch.int32) if packed else None
    k_lens = torch.tensor([100, 256], dtype=torch.int32) if "k_lens" in extras else None
    sinks = torch.zeros(4) if "sinks" in extras else None
    cap = 30.0 if "softcap" in extras else 0.0
    room.forward(q, k, k, cu, None, k_lens, None, sinks, None, None, left, right, cap, 0.0)


if __name__ == "__main__":
    window = [None if w == "-" else int(w) for w in sys.argv[4:6]]
    main(lambda: forward(getattr(torch, sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])), *window, sys.argv[6]))
