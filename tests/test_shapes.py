"""Shapes and options that nobody chose: hypothesis draws them, the conformance check judges them."""

import dataclasses

import pytest
import support
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from riftco.kernels._cases import Case
from riftco.kernels._check import inputs_of

FEW, SOME, MANY = st.integers(1, 3), st.integers(1, 40), st.integers(2, 150)
BOOL = st.booleans()
DRAWN = {
    "attention": (
        dict(
            B=FEW,
            T=SOME,
            S=st.integers(2, 40),
            K=FEW,
            H=FEW,
            D=st.sampled_from([8, 16, 20, 33]),
            DV=st.sampled_from([8, 16, 24]),
        ),
        dict(causal=BOOL),
    ),
    "cross_entropy": (
        dict(B=FEW, T=st.integers(3, 9), V=MANY),
        dict(reduction=st.sampled_from(["mean", "sum", "none"]), weighted=BOOL, int32=BOOL),
    ),
    "linear_cross_entropy": (dict(B=FEW, T=st.integers(3, 9), C=SOME, V=MANY), dict(bias=BOOL)),
    "nf4": (dict(M=MANY, N=SOME, K=MANY), dict(bias=BOOL, double_quant=BOOL)),
    "gguf_linear": (
        dict(M=MANY, N=SOME, K=st.sampled_from([256, 512])),
        dict(bias=BOOL, format=st.sampled_from(["Q4_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"])),
    ),
    "lora_linear": (dict(M=MANY, N=SOME, C=MANY, R=SOME), dict(bias=BOOL, nf4=BOOL)),
    "rms_norm": (dict(B=FEW, T=SOME, C=MANY), {}),
    "rope": (dict(B=FEW, T=SOME, H=FEW, K=FEW, D=st.just(24), R=st.sampled_from([2, 8, 24])), dict(interleaved=BOOL)),
    "swiglu": (dict(B=FEW, T=SOME, F=MANY), {}),
}


@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton")))
@pytest.mark.parametrize("room", list(DRAWN))
def test_drawn(room, device):
    cases = support.rooms()[room]
    shape, options = DRAWN[room]
    # an index or a mask that is off by one is wrong by far more than rounding: the float32 budget may be wide here
    wide = dataclasses.replace(device, loss=32.0)

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.fixed_dictionaries(shape), st.fixed_dictionaries(options))
    def check(shape, options):
        if room == "attention":
            shape["H"] *= shape["K"]
        case = Case(f"{shape} {options}", shape, options)
        if cases.exercises(case, inputs_of(cases, case, torch.float32)):
            support.check_case(cases, case, torch.float32, wide)

    check()
