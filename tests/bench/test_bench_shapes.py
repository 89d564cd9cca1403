"""The shapes at which the contracts state times are benched, with the options that they name."""

import pytest
import support

SHAPES = {
    "A1.6": ("attention", dict(T=256, S=2048, H=16, K=4, D=256, DV=256), dict(causal=True)),
    "A4.6, square": ("gguf_linear", dict(M=1024, N=1536, K=1536), dict(format="Q4_K")),
    "A4.6, up": ("gguf_linear", dict(M=1024, N=8960, K=1536), dict(format="Q4_K")),
    "A4.6, down": ("gguf_linear", dict(M=1024, N=1536, K=8960), dict(format="Q4_K")),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_contracts_shape_is_benched(name):
    """Forward, backward and both, each with operations of its own to divide by the time."""
    room, shape, options = SHAPES[name]
    cases = support.rooms()[room]
    found = [
        c for c in cases.BENCH if shape.items() <= dict(c.shape).items() and options.items() <= dict(c.options).items()
    ]
    assert len(found) >= 1
    for case in found:
        assert cases.flops(case) > 0
        assert not hasattr(cases, "forward_flops") or 0 < cases.forward_flops(case) < cases.flops(case)
