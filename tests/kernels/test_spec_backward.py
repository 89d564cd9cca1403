"""The closed-form backward of every room's spec against autograd of its forward, case by case, with planted bugs."""

import pytest
import support
import torch

ROOMS = support.rooms()


def _params():
    for room, cases in ROOMS.items():
        for case in cases.CASES:
            marks = [pytest.mark.slow] if case.slow else []
            yield pytest.param(cases, case, id=f"{room}-{case.name.replace(' ', '_')}", marks=marks)


@pytest.mark.parametrize("cases,case", list(_params()))
def test_case(cases, case):
    support.check_case(cases, case, torch.float32, support.SPEC)


LORA = "lora_linear.spec"
BUGS = [  # LoRA's spec is what XLA runs and what a float64 model learns by
    (LORA, "g = torch.cat([s * (d @", "g = torch.cat([(d @", "rank 1"),
    (LORA, "d_adapters += [(s * (d.t() @ p))", "d_adapters += [((d.t() @ p))", "rank 1"),
    (LORA, "inverse * masked(g @ a, seed, rows, dropout_p)", "masked(g @ a, seed, rows, dropout_p)", "dropout"),
    (LORA, "(inverse * (g.t() @ h.to(D)", "(1.0 * (g.t() @ h.to(D)", "dropout"),
    (LORA, "inverse * masked(g @ a, seed, rows, dropout_p)", "inverse * (g @ a)", "dropout"),
    (LORA, "sum((t.to(acc) for t in others), first.to(acc))", "first.to(acc)", "group"),
    (LORA, "d_rows = [pick(t, rows)", "d_rows = [pick(t, None)[: len(pick(t, rows))]", "rows"),
    ("swiglu.spec", "(d * up.to(acc) * slope)", "(d * slope)", "odd sizes"),
    ("rms_norm.spec", "(g - n * (g * n).mean(-1, keepdim=True))", "g", "odd sizes"),
    ("layer_norm.spec", "g - g.mean(-1, keepdim=True) - n", "g - n", "odd sizes"),
    ("nf4.spec", "return d_y @ dequantize(", "return 1.01 * d_y @ dequantize(", "many rows"),
]


@pytest.mark.parametrize("module,old,new,case", BUGS)
def test_planted_bugs(module, old, new, case):
    room = module.partition(".")[0]
    support.assert_caught(ROOMS[room], f"riftco.kernels.{module}", old, new, case, device="cpu-spec")
