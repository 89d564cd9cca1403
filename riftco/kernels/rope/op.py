"""The contract of rotary position embedding: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import check_impl, flags, floating, given, indices
from .._contract import Function, checks_enabled, define, needs_grad, same_device, write
from .._overlap import lies_once, share_memory
from . import spec

HERE = "riftco.kernels.rope"


def _fake(x, cos, sin, positions, interleaved, transpose):
    return [t.new_empty(t.shape) for t in x]


def _fake_inplace(x, cos, sin, positions, interleaved):
    return None


turn = define(
    "rope",
    "(Tensor[] x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool transpose) -> Tensor[]",
    fake=_fake,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.rope:forward",
        "xla": f"{HERE}.spec:forward",
    },
)
turn_inplace = define(
    "rope_",
    "(Tensor(a!)[] x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved) -> ()",
    fake=_fake_inplace,
    spec=f"{HERE}.spec:inplace",
    launchers={
        "cpu": f"{HERE}.cpu:inplace",
        "cuda": f"{HERE}.cuda:inplace",
        "mps": "riftco.metal.rope:inplace",
        "xla": f"{HERE}.spec:inplace",
    },
)


class Rope(Function):
    @staticmethod
    def forward(cos, sin, positions, interleaved, transpose, *x):
        return tuple(turn(list(x), cos, sin, positions, interleaved, transpose))

    @staticmethod
    def setup_context(ctx, inputs, output):
        cos, sin, positions, ctx.interleaved, ctx.transpose, *_ = inputs
        ctx.save_for_backward(cos, sin, positions)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *d_out):
        """The transposed rotation of the gradients that exist and are wanted; linear, so differentiable again."""
        wanted = [i for i, d in enumerate(d_out) if d is not None and ctx.needs_input_grad[5 + i]]
        d_x: list[Tensor | None] = [None] * len(d_out)
        if wanted:
            cos, sin, positions = ctx.saved_tensors
            turned = _turn([d_out[i] for i in wanted], cos, sin, positions, ctx.interleaved, not ctx.transpose)
            for i, d in zip(wanted, turned):
                d_x[i] = d
        return None, None, None, None, None, *d_x


def _turn(x, cos, sin, positions, interleaved, transpose):
    if needs_grad(*x):
        return Rope.apply(cos, sin, positions, interleaved, transpose, *x)
    return turn(x, cos, sin, positions, interleaved, transpose)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys in one launch.

    With p the token's position and i < R / 2, the pair (a, b) becomes
    (a cos[p, i] - b sin[p, i], b cos[p, i] + a sin[p, i]); elements from R on pass unchanged.

    Args:
        q: [..., T, H, D] (or packed [total, H, D]), float16/bfloat16/float32/float64, any strides. Differentiable.
        k: [..., T, K, D], as q. Differentiable.
        cos: [max_position, R / 2] float32 with R <= D even, as `rope_tables` makes. Not differentiable.
        sin: as cos.
        positions: int32 or int64, [..., T], [T] or [total]; None counts 0, 1, ... along T. A position outside the
            tables gives NaN for its token and touches no memory outside (with RIFTCO_CHECK=1: IndexError).
        interleaved: a pair is (2 i, 2 i + 1) instead of (i, i + R / 2).
        inplace: write over q and k and return them. Only where no gradient is recorded.
        impl: "spec" runs the plain-torch meaning under autograd.

    Returns:
        (q, k) turned, contiguous, each in its own dtype.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, a position outside the tables.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: float32 inside with float32 tables, rounded once (transformers rounds the tables to q's dtype first).
        Deterministic. Nothing but the tables and positions is saved for the backward, which turns by minus the angle;
        it may be differentiated again.
    Source: Su et al. 2021, "RoFormer", equation 34.
    """
    flags("rope", interleaved=interleaved, inplace=inplace)
    _check(q, k, cos, sin, positions, inplace, impl)
    if positions is not None:
        if checks_enabled():
            check_positions(positions, cos.shape[0])
        positions = positions.expand(q.shape[:-2])
    if inplace:
        write(turn_inplace, q.device, [q, k], cos, sin, positions, interleaved)
        return q, k
    if impl == "spec":
        q, k = spec.forward([q, k], cos, sin, positions, interleaved, False)
    else:
        q, k = _turn([q, k], cos, sin, positions, interleaved, False)
    return q, k


def check_positions(positions: Tensor, max_position: int) -> None:
    """IndexError naming the first position outside the tables, as RIFTCO_CHECK=1 asks. Costs a synchronisation."""
    flat = positions.flatten()
    bad = ((flat < 0) | (flat >= max_position)).nonzero()
    if len(bad):
        n = int(bad[0])
        raise IndexError(f"rope: position {int(flat[n])} of token {n}, but the tables have {max_position} rows")


def _check(q, k, cos, sin, positions, inplace, impl) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if not floating(table) or table.dim() != 2 or table.shape != cos.shape or table.dtype != torch.float32:
            raise ValueError(f"rope: {name} must be float32 [max_position, R / 2]; got {given(table)}")
        if table.requires_grad:
            raise ValueError(f"rope: {name} is not differentiable; detach it")
    for name, x in (("q", q), ("k", k)):
        if not floating(x) or x.dim() < 3:
            raise ValueError(f"rope: {name} must be floating [..., T, heads, D]; got {given(x)}")
        if x.shape[-1] < 2 * cos.shape[-1]:
            raise ValueError(f"rope: {name} has head dim {x.shape[-1]}, less than the tables' {2 * cos.shape[-1]}")
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"rope: q and k must have the same tokens; got {tuple(q.shape)} and {tuple(k.shape)}")
    if positions is None:
        if q.shape[-3] > cos.shape[0]:
            raise ValueError(f"rope: {q.shape[-3]} tokens, but the tables have {cos.shape[0]} rows")
    elif not indices(positions) or not _expands(positions.shape, q.shape[:-2]):
        raise ValueError(f"rope: positions must be int32 or int64 {tuple(q.shape[:-2])}; got {given(positions)}")
    if inplace:
        if needs_grad(q, k):
            raise ValueError("rope: inplace=True records no gradient; use torch.no_grad() or detach q and k")
        if impl is not None:
            raise ValueError("rope: inplace=True and impl cannot be combined")
        for name, x in (("q", q), ("k", k)):
            if x.dim() > 4 or not lies_once(x):
                raise ValueError(
                    f"rope: inplace=True needs {name} of at most 4 dimensions, none of them expanded or overlapping; "
                    f"got {tuple(x.shape)} with strides {x.stride()}"
                )
        if q is k or share_memory(q, k):  # what both have would be turned twice, or by a race
            raise ValueError("rope: inplace=True needs q and k to be two tensors; got one for both, or common elements")
    check_impl("rope", impl)
    same_device("rope", q=q, k=k, cos=cos, sin=sin, positions=positions)


def _expands(shape, to) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))
