"""The contract of taking and replacing rows: schemas, shapes, devices, gradients. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import check_impl, flags, floating, given, indices, number, whole
from .._contract import Function, checks_enabled, define, needs_grad, once_differentiable, same_device
from . import spec

HERE = "riftco.kernels.embedding"


def _fake_fwd(weight, ids):
    return weight.new_empty(*ids.shape, weight.shape[1])


def _fake_bwd(d_out, ids, rows, padding_idx, by_frequency):
    return d_out.new_empty(rows, d_out.shape[1])


def _fake_scatter(x, ids, rows):
    return x.new_empty(x.shape), ids.new_empty(x.shape[0], dtype=torch.int64)


def _fake_scatter_bwd(d_out, ids, owner, need_x, need_rows):
    d_x = d_out.new_empty(d_out.shape) if need_x else d_out.new_empty(0)
    return d_x, d_out.new_empty(ids.shape[0], d_out.shape[1]) if need_rows else d_out.new_empty(0)


fwd = define(
    "embedding_fwd",
    "(Tensor weight, Tensor ids) -> Tensor",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={"cuda": f"{HERE}.cuda:forward", "mps": "riftco.metal.embedding:forward", "xla": f"{HERE}.spec:forward"},
)
bwd = define(
    "embedding_bwd",
    "(Tensor d_out, Tensor ids, SymInt rows, int? padding_idx, bool by_frequency) -> Tensor",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.embedding:backward",
        "xla": f"{HERE}.spec:backward",
    },
)
scatter = define(
    "scatter_rows_fwd",
    "(Tensor x, Tensor ids, Tensor rows) -> (Tensor out, Tensor owner)",
    fake=_fake_scatter,
    spec=f"{HERE}.spec:scatter",
    launchers={
        "cpu": f"{HERE}.cpu:scatter",
        "cuda": f"{HERE}.cuda:scatter",
        "mps": "riftco.metal.embedding:scatter",
        "xla": f"{HERE}.spec:scatter",
    },
)
scatter_bwd = define(
    "scatter_rows_bwd",
    "(Tensor d_out, Tensor ids, Tensor owner, bool need_x, bool need_rows) -> (Tensor d_x, Tensor d_rows)",
    fake=_fake_scatter_bwd,
    spec=f"{HERE}.spec:scatter_backward",
    launchers={
        "cpu": f"{HERE}.cpu:scatter_backward",
        "cuda": f"{HERE}.cuda:scatter_backward",
        "mps": "riftco.metal.embedding:scatter_backward",
        "xla": f"{HERE}.spec:scatter_backward",
    },
)


class Embedding(Function):
    @staticmethod
    def forward(weight, ids, padding_idx, by_frequency):
        return fwd(weight, ids)

    @staticmethod
    def setup_context(ctx, inputs, output):
        weight, ids, ctx.padding_idx, ctx.by_frequency = inputs
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        (ids,) = ctx.saved_tensors
        d_rows = d_out.reshape(ids.numel(), d_out.shape[-1])
        return bwd(d_rows, ids.reshape(-1), ctx.rows, ctx.padding_idx, ctx.by_frequency), None, None, None


class ScatterRows(Function):
    @staticmethod
    def forward(x, ids, rows):
        return scatter(x, ids, rows)

    @staticmethod
    def setup_context(ctx, inputs, output):
        owner = output[1]
        ctx.mark_non_differentiable(owner)
        ctx.save_for_backward(inputs[1], owner)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, _):
        ids, owner = ctx.saved_tensors
        need_x, need_rows = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        d_x, d_rows = scatter_bwd(d_out, ids, owner, need_x, need_rows)
        return d_x if need_x else None, None, d_rows if need_rows else None


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    impl: str | None = None,
) -> Tensor:
    """Rows of `weight` by id, torch.nn.functional.embedding's arguments; the gradient is summed in a fixed order.

    Args:
        input: ids, int32 or int64, any shape and strides, each in [0, V).
        weight: [V, C], float16/bfloat16/float32/float64, rows of any stride. Differentiable.
        padding_idx: a row that gets no gradient; counted from the end if negative.
        max_norm, norm_type: first scale, in place, those rows that are used and longer than this.
        scale_grad_by_freq: divide each row's gradient by how often its id occurs.
        sparse: refused; gradients are dense.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., C] in weight's dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: an id outside, on CPUs. Elsewhere with RIFTCO_CHECK=1; without, such a row is NaN on CUDA, gets no
            gradient, and no memory outside is touched.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: the gradient of a row is summed in the order of the ids, in float32, and rounded once; no atomics, so runs
        are bit-equal on CPUs and CUDA. Saved for the backward: the ids.
    """
    name = "embedding"
    flags(name, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if sparse:
        raise ValueError(f"{name}: sparse=True is not supported; gradients are dense")
    _check(name, weight, "weight", input, impl)
    rows = weight.shape[0]
    if padding_idx is not None:
        whole(name, "padding_idx", padding_idx, f"within the {rows} rows", least=-rows, most=rows - 1)
        padding_idx %= rows
    if max_norm is not None:
        number(name, "max_norm", max_norm, "at least 0", least=0, below=None)
        number(name, "norm_type", norm_type, "above 0", above=0, below=None)
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    return _embedding(weight, input, padding_idx, scale_grad_by_freq, impl)


def gather_rows(x: Tensor, ids: Tensor, *, impl: str | None = None) -> Tensor:
    """Row ids[...] of x, as x[ids].

    Args:
        x: [N, C], float16/bfloat16/float32/float64, rows of any stride. Differentiable.
        ids: int32 or int64, any shape and strides, each in [0, N).
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., C] in x's dtype, contiguous.

    Raises, devices and numerics: as `embedding`.
    """
    _check("gather_rows", x, "x", ids, impl)
    return _embedding(x, ids, None, False, impl)


def scatter_rows(x: Tensor, ids: Tensor, rows: Tensor, *, impl: str | None = None) -> Tensor:
    """A copy of x [N, C] in which row ids[i] is rows[i]; all other rows keep their bytes.

    Args:
        x: float16/bfloat16/float32/float64, any strides. Its gradient is the result's, and 0 at replaced rows.
        ids: [n], int32 or int64, each in [0, N). Where one occurs several times the last counts.
        rows: [n, C], x's dtype, any strides. Its gradient is the result's at ids, 0 for rows that do not count.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [N, C], contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, each named.
        IndexError: an id outside, with RIFTCO_CHECK=1. Without, CPUs raise what PyTorch raises, CUDA ignores the row.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: copies only. Deterministic. Saved for the backward: ids and the owner of each row, no values.
    """
    name = "scatter_rows"
    _check(name, x, "x", ids, impl)
    if not floating(rows) or rows.dtype != x.dtype:
        raise ValueError(f"{name}: rows must be {x.dtype} as x; got {given(rows)}")
    if ids.dim() != 1 or rows.shape != (ids.shape[0], x.shape[1]):
        raise ValueError(
            f"{name}: ids must be [n] and rows [n, {x.shape[1]}]; got {tuple(ids.shape)} and {tuple(rows.shape)}"
        )
    same_device(name, x=x, rows=rows)
    if impl == "spec":
        return spec.scatter(x, ids, rows)[0]
    if needs_grad(x, rows):
        return ScatterRows.apply(x, ids, rows)[0]
    return scatter(x, ids, rows)[0]


def _embedding(weight, ids, padding_idx, by_frequency, impl):
    if impl == "spec":
        if padding_idx is None and not by_frequency:
            return spec.forward(weight, ids)
        return SpecEmbedding.apply(weight, ids, padding_idx, by_frequency)
    if needs_grad(weight):
        return Embedding.apply(weight, ids, padding_idx, by_frequency)
    return fwd(weight, ids)


class SpecEmbedding(Embedding):
    """The spec with its own backward, differentiable again: padding and frequencies are rules of the gradient alone."""

    @staticmethod
    def forward(weight, ids, padding_idx, by_frequency):
        return spec.forward(weight, ids)

    @staticmethod
    def backward(ctx, d_out):
        (ids,) = ctx.saved_tensors
        d_rows = d_out.reshape(ids.numel(), d_out.shape[-1])
        return spec.backward(d_rows, ids.reshape(-1), ctx.rows, ctx.padding_idx, ctx.by_frequency), None, None, None


def _check(op: str, table, name, ids, impl) -> None:
    if not floating(table) or table.dim() != 2:
        raise ValueError(f"{op}: {name} must be floating [rows, C]; got {given(table)}")
    if not indices(ids):
        raise ValueError(f"{op}: ids must be int32 or int64; got {given(ids)}")
    check_impl(op, impl)
    same_device(op, **{name: table, "ids": ids})
    if checks_enabled() and ids.numel():
        bad = (ids < 0) | (ids >= table.shape[0])
        if bool(bad.any()):
            at = int(bad.reshape(-1).nonzero()[0])
            raise IndexError(f"{op}: id {int(ids.reshape(-1)[at])} at {at} is outside of the {table.shape[0]} rows")
