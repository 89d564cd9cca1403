"""Compiles cross-entropy's ring for a Hopper GPU that need not be there: `python compile_ring.py <V> <dtype>
[panels]`.

Prints shared memory, programs of a multiprocessor, bytes spilled, and the order in which the writing warps load a slot,
store the gradient and free the slot.
"""

import itertools
import re
import sys

import torch
from compile_hopper import assembled, spilled
from compile_kernels import recorded

from riftco.kernels.cross_entropy.cuda import hopper
from riftco.kernels.cross_entropy.route import route

KINDS = {"load": r"LDS\.128", "store": r"STG\.\S*128 .*, R\d+$", "free": r"SYNCS\.ARRIVE\S*A1T0"}

if __name__ == "__main__":
    V, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    ring = route(4096, V, dtype, (9, 0)).ring
    assert ring is not None
    hopper._multiprocessors = lambda device: 132
    x, y, rows = torch.empty(300, V, dtype=dtype), torch.zeros(300, dtype=torch.int64), [torch.empty(300)] * 3
    of_rows = hopper.Rows(y, rows[0], torch.ones(()), 0, rows, (-100, 0.0, 1.0))
    with recorded() as launches:
        if "panels" in sys.argv:
            panels = [torch.empty(300, min(8192, V - lo), dtype=dtype) for lo in range(0, V, 8192)]
            hopper.in_panels(panels, 3, of_rows, ring)
        else:
            hopper.forward_backward(x, (300, 0, V), x.clone(), (0, V), of_rows, ring)
    ((kernel, arguments, options),) = launches
    shared, said, sass = assembled(kernel, arguments, options)
    code = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", sass)
    found = (kind for text in code for kind, shape in KINDS.items() if re.search(shape, text))
    writing = [kind for kind, _ in itertools.groupby(found)]
    print(shared, ring.programs, spilled(said), ",".join(writing))
