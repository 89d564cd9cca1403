"""Every room with an XLA launcher, forward and backward: one graph, no fallback, no second compilation."""

import pytest
import support
import torch
from xla_graph import recorded

pytestmark = pytest.mark.xla
XLA = support.device_params(("xla",))


def run(cases, case, dtype, seed):
    """Forward and backward of one case; nothing is read back, so that all of it is one graph."""
    inputs = support.to(support.inputs_of(cases, case, dtype, seed), dtype, "xla")
    leaves = {k: v.requires_grad_() if k in cases.GRADS else v for k, v in inputs.items()}
    with recorded() as record:
        out = cases.call(leaves, case)
        wanted = [leaves[k] for k in cases.GRADS if k in leaves]
        grads = torch.autograd.grad(sum(o.sum() for o in out.values() if o.requires_grad), wanted) if wanted else ()
    assert all(t.device.type == "xla" for t in (*out.values(), *grads))
    return record


@pytest.mark.parametrize("device", XLA)
@pytest.mark.parametrize("room", list(support.rooms()))
def test_one_graph(room, device):
    cases = support.rooms()[room]
    if "xla" not in getattr(cases, "DEVICES", ("xla",)):
        pytest.skip(f"{room}: not on XLA")
    compiles = 0
    for case in (c for c in cases.CASES if not c.slow and support.serves(cases, "xla", c)):
        first = run(cases, case, torch.bfloat16, seed=0)
        assert not first.fallbacks, f"{case.name}: {first.fallbacks}"
        assert first.compiles <= 1 and first.executions == 1, f"{case.name}: {first}"
        again = run(cases, case, torch.bfloat16, seed=1)
        assert (again.compiles, again.executions) == (0, 1), f"{case.name}, second call: {again}"
        compiles += first.compiles
    assert compiles  # cases of one shape share a graph, but not all of them do
