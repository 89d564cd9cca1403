"""Inputs of the Adam step for the conformance test and the bench. N elements of the larger of two parameters."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import adam_step

GRADS: tuple[str, ...] = ()  # an update in place has no gradient of its own
ROUNDINGS: dict[str, int] = {}
NAMES = ("param", "exp_avg", "exp_avg_sq")
CASES = (
    Case("one element", dict(N=1), dict(t=0)),
    Case("first step", dict(N=77), dict(t=0)),
    Case("later step, decay", dict(N=77), dict(t=41, weight_decay=0.1)),
    Case("not decoupled", dict(N=77), dict(t=3, weight_decay=0.1, decoupled=False)),
    Case("clipped", dict(N=77), dict(t=3, gradient_clip=0.5)),
    Case("several chunks", dict(N=40_000), dict(t=9, gradient_clip=1.0, weight_decay=0.01)),
    Case("refused", dict(N=77), dict(t=9, broken=True)),
    Case("own betas", dict(N=300), dict(t=2, betas=(0.5, 0.0), eps=1e-3)),
)
BENCH = (
    Case("LoRA, 10 M", dict(N=10_000_000), dict(t=9, gradient_clip=1.0)),
    Case("SmolLM2, 135 M", dict(N=135_000_000), dict(t=9, gradient_clip=1.0)),
)
LR = 0.05


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {}
    for i, shape in enumerate(((case.shape["N"],), (3, 5))):
        inputs[f"param{i}"], inputs[f"grad{i}"] = draw(*shape), 0.3 * draw(*shape)
        seen = min(case.options["t"], 1)
        inputs[f"exp_avg{i}"] = (0.1 * seen * draw(*shape)).float()
        inputs[f"exp_avg_sq{i}"] = (0.1 * seen * draw(*shape).square()).float()
    if case.options.get("broken"):
        inputs["grad0"][-1] = torch.nan
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    return bool((inputs["grad0"] != 0).all()) and bool(inputs["grad0"].isfinite().all()) != bool(
        case.options.get("broken")
    )


def _run(inputs: dict[str, Tensor], case: Case, impl: str | None) -> dict[str, Tensor]:
    params = [inputs[f"param{i}"].clone() for i in range(2)]
    acc = spec.accumulation_dtype(params)
    first, second = ([inputs[f"{name}{i}"].to(acc, copy=True) for i in range(2)] for name in NAMES[1:])
    steps = [torch.tensor(float(case.options["t"]), device=p.device) for p in params]
    options = {k: v for k, v in case.options.items() if k not in ("t", "broken")}
    grads = [inputs["grad0"], inputs["grad1"]]
    norm, scale = adam_step(params, grads, first, second, steps, lr=LR, impl=impl, **options)
    results = {"norm": norm, "clip_scale": scale}
    for name, tensors in zip((*NAMES, "step"), (params, first, second, steps)):
        results.update({f"{name}{i}": t for i, t in enumerate(tensors)})
    return results


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return _run(inputs, case, None)


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return _run(inputs, case, "spec")


def flops(case: Case) -> int:
    """Four an element for the norm, about sixteen for the update."""
    return 20 * case.shape["N"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: the gradient read for the norm and again for the update; parameter and moments read and written."""
    return case.shape["N"] * (4 * dtype.itemsize + 4 * 4)
