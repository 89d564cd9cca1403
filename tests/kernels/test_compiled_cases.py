"""Conformance cases of the elementwise rooms, compiled for a GPU: what the interpreter accepts Triton may refuse."""

import pytest
import support


@pytest.mark.parametrize("room", ["embedding", "rope", "swiglu"])
def test_every_case_compiles_and_none_spills(room):
    kernels = support.compiled("compile_kernels.py", 80, "cases", room, "bfloat16")
    assert len(kernels) >= 6
    for name, shared, spilled in kernels:
        assert int(shared) <= 99 * 1024 and int(spilled) == 0, (name, shared, spilled)
