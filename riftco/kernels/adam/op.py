"""The contract of the Adam step: schemas, shapes, devices. Torch-only; imports no kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import tpu
from .._arguments import check_impl, flags, floating, given, number
from .._contract import define, same_device, write
from .._overlap import first_shared, lies_once
from . import spec

HERE = "riftco.kernels.adam"


def _fake_norm(grads, clip):
    acc = spec.accumulation_dtype(grads)
    scalar = grads[0].new_empty((), dtype=acc)
    return scalar, torch.empty_like(scalar), grads[0].new_empty((), dtype=torch.bool)


def _fake_step(*_args):
    return None


norm = define(
    "adam_norm",
    "(Tensor[] grads, float? clip) -> (Tensor norm, Tensor clip_scale, Tensor committed)",
    fake=_fake_norm,
    spec=f"{HERE}.spec:norm",
    launchers={"cuda": f"{HERE}.cuda:norm", "mps": "riftco.metal.adam:norm", "xla": "riftco.tpu.adam:norm"},
)
step = define(
    "adam_step",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps,"
    " Tensor committed, Tensor clip_scale, Tensor lr, float beta1, float beta2, float eps, float weight_decay,"
    " bool decoupled) -> ()",
    fake=_fake_step,
    spec=f"{HERE}.spec:step",
    launchers={
        "cpu": f"{HERE}.cpu:step",
        "cuda": f"{HERE}.cuda:step",
        "mps": "riftco.metal.adam:step",
        "xla": "riftco.tpu.adam:step",
    },
)
advance = define(
    "adam_advance",
    "(Tensor(a!)[] steps, Tensor committed) -> ()",
    fake=_fake_step,
    spec=f"{HERE}.spec:advance",
    launchers={"cuda": f"{HERE}.cuda:advance", "mps": f"{HERE}.spec:advance", "xla": "riftco.tpu.adam:advance"},
)
paged_step = define(
    "adam_paged_step",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] slabs, int[] starts, int[] firsts, int page_size,"
    " Tensor[] steps, Tensor committed, Tensor clip_scale, Tensor lr, float beta1, float beta2, float eps,"
    " float weight_decay, bool decoupled) -> ()",
    fake=_fake_step,
    spec=f"{HERE}.spec:paged_step",
    launchers={
        "cpu": f"{HERE}.cpu:paged_step",
        "cuda": f"{HERE}.cuda:paged_step",
        "mps": "riftco.metal.adam:paged_step",
    },
)


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    gradient_clip: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One transactional Adam update in place: all tensors change, or none.

    g = clip_scale * grad (+ weight_decay * p unless decoupled), m = beta1 m + (1 - beta1) g,
    v = beta2 v + (1 - beta2) g^2, p = p (1 - lr * weight_decay if decoupled) - lr mh / (sqrt(vh) + eps) with
    mh = m / (1 - beta1^t) and vh = v / (1 - beta2^t).

    Args:
        params: float16/bfloat16/float32/float64, any shapes and strides, one device. Changed.
        grads: one per parameter, same shape, any of these dtypes.
        exp_avgs: first moments m, float32 (float64 beside float64 parameters), same shape. Changed.
        exp_avg_sqs: second moments v, as exp_avgs. Changed.
        steps: scalars, float32, on the parameters' device: the updates made so far. Changed.
        lr: a float, or a scalar tensor on the device.
        betas, eps, weight_decay, decoupled: as in Adam (decoupled: AdamW).
        gradient_clip: the largest global norm; clip_scale is 1 within it, else gradient_clip / norm.
        impl: "spec" runs the plain-torch meaning.

    Returns:
        (gradient_norm, clip_scale): scalars on the device, of this same update. A step is refused, clip_scale is 0 and
        nothing is changed when a gradient is not finite (then the norm is inf or NaN too) or when the square of a
        clipped one would not be.

    Raises:
        ValueError: tensors or options that do not fit, each named.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: float32, each parameter rounded once; the norm is taken in two passes and cannot overflow while it is
        representable. Deterministic, no host synchronisation.
    Source: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2.
    """
    p, g, m, v, t = (list(tensors) for tensors in (params, grads, exp_avgs, exp_avg_sqs, steps))
    check(p, g, m, v, t)
    check_options(lr, betas, eps, weight_decay, gradient_clip)
    flags("Adam", decoupled=decoupled)
    check_impl("adam_step", impl)
    written = {"params": p, "exp_avgs": m, "exp_avg_sqs": v, "steps": t}
    check_written("adam_step", {f"{name}[{i}]": x for name, tensors in written.items() for i, x in enumerate(tensors)})
    total, scale, committed = (spec.norm if impl == "spec" else norm)(g, gradient_clip)
    rate = rate_tensor(lr, spec.accumulation_dtype(m), m[0].device)
    args = (p, g, m, v, t, committed, scale, rate, betas[0], betas[1], eps, weight_decay, decoupled)
    if impl == "spec":
        spec.step(*args)
    else:
        write(step, m[0].device, *args)
    return total, scale


def rate_tensor(lr: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The learning rate as a scalar beside the moments; a fill, not a copy, so that nothing waits. XLA would compile
    the number into the graph, and another graph for the next one."""
    if isinstance(lr, Tensor):
        return lr.to(device, dtype).reshape(())
    if device.type == "xla":
        return tpu.number(lr, dtype, device)
    return torch.full((), lr, dtype=dtype, device=device)


def check(params, grads, exp_avgs, exp_avg_sqs, steps) -> None:
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    if not params:
        raise ValueError("adam_step: no parameters")
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(f"adam_step: {len(params)} params but {len(tensors)} {name}")
    for i, p in enumerate(params):
        if not floating(p) or not floating(grads[i]):
            raise ValueError(f"adam_step: params[{i}] and grads[{i}] must be floating; got {given(p, grads[i])}")
        for name in ("exp_avgs", "exp_avg_sqs", "steps"):
            if not isinstance(lists[name][i], Tensor):
                raise ValueError(f"adam_step: {name}[{i}] must be a tensor; got {given(lists[name][i])}")
        for name in ("grads", "exp_avgs", "exp_avg_sqs"):
            if lists[name][i].shape != p.shape:
                raise ValueError(
                    f"adam_step: {name}[{i}] must have the shape {tuple(p.shape)}; got {tuple(lists[name][i].shape)}"
                )
        acc = torch.promote_types(p.dtype, torch.float32)
        for name in ("exp_avgs", "exp_avg_sqs"):
            if lists[name][i].dtype != acc:
                raise ValueError(f"adam_step: {name}[{i}] must be {acc}; got {lists[name][i].dtype}")
        if steps[i].shape != () or steps[i].dtype != torch.float32:
            raise ValueError(f"adam_step: steps[{i}] must be a float32 scalar; got {steps[i].dtype}")
        same_device(
            "adam_step",
            **{"params[0]": params[0], f"params[{i}]": p},
            **{f"{name}[{i}]": tensors[i] for name, tensors in lists.items()},
        )


def check_written(op: str, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that are changed in place but have an element twice, or one of another tensor."""
    for name, t in tensors.items():
        if not lies_once(t):
            raise ValueError(
                f"{op}: {name} must have a place in memory for each element, neither expanded nor overlapping; "
                f"got {tuple(t.shape)} with strides {t.stride()}"
            )
    if pair := first_shared(list(tensors.values())):
        names = list(tensors)
        raise ValueError(f"{op}: {names[pair[0]]} and {names[pair[1]]} must not have elements in common; they do")


def check_options(lr, betas, eps, weight_decay, gradient_clip) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not floating(lr):
            raise ValueError(f"Adam: lr must be one floating number; got a tensor, {given(lr)}")
    else:
        number("Adam", "lr", lr, "finite and at least 0", least=0)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Adam: betas must be two numbers in [0, 1); got {betas!r}")
    for beta in betas:
        number("Adam", "betas", beta, "two numbers in [0, 1)", least=0, below=1)
    number("Adam", "eps", eps, "finite and at least 0", least=0)
    number("Adam", "weight_decay", weight_decay, "finite and at least 0", least=0)
    if gradient_clip is not None:
        number("Adam", "gradient_clip", gradient_clip, "above 0, or None", above=0, below=None)
