"""The contract of lora_linear: schemas, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._contract import autocast, checks_enabled, define, needs_grad, once_differentiable, same_device
from ..nf4.weight import NF4Weight
from . import spec

HERE = "riftco.kernels.lora_linear"
LAUNCHERS = {"cpu": "cpu", "cuda": "cuda", "mps": "spec", "xla": "spec"}
MAX_RANK = 256


def _fake_fwd(x, weight, absmax, block_size, bias, lora_a, lora_b, scale, keep, dropout_p, rows):
    M = x.shape[:-1].numel() if rows is None else rows.shape[0]
    D = torch.promote_types(lora_a.dtype, lora_b.dtype)
    return x.new_empty((*x.shape[:-1], lora_b.shape[0])), x.new_empty((M, lora_a.shape[0]), dtype=D)


def _fake_bwd(
    d_y, x, weight, absmax, block_size, lora_a, lora_b, xa, scale, keep, dropout_p, rows, need_x, need_w, need_a, need_b
):
    d_x = d_y.new_empty((*d_y.shape[:-1], lora_a.shape[1]) if need_x else 0)
    d_w = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_w else d_y.new_empty(0)
    d_a = lora_a.new_empty(lora_a.shape) if need_a else d_y.new_empty(0)
    return d_x, d_w, d_a, lora_b.new_empty(lora_b.shape) if need_b else d_y.new_empty(0)


fwd = define(
    "lora_linear_fwd",
    "(Tensor x, Tensor weight, Tensor? absmax, int block_size, Tensor? bias, Tensor lora_a, Tensor lora_b, float scale,"
    " Tensor? keep, float dropout_p, Tensor? rows) -> (Tensor y, Tensor xa)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={device: f"{HERE}.{file}:forward" for device, file in LAUNCHERS.items()},
)
bwd = define(
    "lora_linear_bwd",
    "(Tensor d_y, Tensor? x, Tensor weight, Tensor? absmax, int block_size, Tensor lora_a, Tensor lora_b, Tensor? xa,"
    " float scale, Tensor? keep, float dropout_p, Tensor? rows, bool need_x, bool need_w, bool need_a, bool need_b)"
    " -> (Tensor d_x, Tensor d_w, Tensor d_a, Tensor d_b)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={device: f"{HERE}.{file}:backward" for device, file in LAUNCHERS.items()},
)


class LoRAProduct(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, absmax, block_size, bias, lora_a, lora_b, scale, keep, dropout_p, rows):
        return fwd(x, weight, absmax, block_size, bias, lora_a, lora_b, scale, keep, dropout_p, rows)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, absmax, ctx.block_size, bias, lora_a, lora_b, ctx.scale, keep, ctx.dropout_p, rows = inputs
        xa = output[1]
        _, need_w, _, _, _, need_a, need_b, *_ = ctx.needs_input_grad
        ctx.mark_non_differentiable(xa)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(
            x if need_w or need_a else None, weight, absmax, lora_a, lora_b, xa if need_b else None, keep, rows
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, _d_xa):
        x, weight, absmax, lora_a, lora_b, xa, keep, rows = ctx.saved_tensors
        need_x, need_w, _, _, need_bias, need_a, need_b, *_ = ctx.needs_input_grad
        d_x, d_w, d_a, d_b = bwd(
            d_y, x, weight, absmax, ctx.block_size, lora_a, lora_b, xa, ctx.scale, keep, ctx.dropout_p, rows,
            need_x, need_w, need_a, need_b,
        )  # fmt: skip
        d_bias = None
        if need_bias:
            acc = torch.promote_types(d_y.dtype, torch.float32)
            batch = d_y.unsqueeze(0)  # summed over no dimension at all, a single vector would give a scalar
            d_bias = batch.sum(tuple(range(batch.dim() - 1)), dtype=acc).to(ctx.bias_dtype)
        return (
            d_x if need_x else None, d_w if need_w else None, None, None, d_bias,
            d_a if need_a else None, d_b if need_b else None, None, None, None, None,
        )  # fmt: skip


def lora_linear(
    x: Tensor,
    weight: Tensor | NF4Weight,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    rows: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """A linear layer and its LoRA adapter.

    y = x W^T + bias + scale * dropout(x) A^T B^T. With g = d_y B: d_x = d_y W + scale * dropout'(g A),
    d_A = scale * g^T dropout(x), d_B = scale * d_y^T (dropout(x) A^T).

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable; saved once, where A or W learns.
        weight: [N, C] in x's dtype, differentiable; or an NF4Weight of shape (N, C), frozen.
        lora_a: [R, C] floating, R = 1..256. Differentiable.
        lora_b: [N, R] floating. Differentiable.
        scale: alpha / R, or alpha / sqrt(R) for rsLoRA; the caller's choice.
        bias: [N], cast to x's dtype. Differentiable.
        dropout_p: probability that an element of x is hidden from the adapter, in training. The mask is drawn from
            torch's generator of the device: the same seed gives the same mask.
        training: False switches the dropout off.
        rows: int64 [L], distinct indices into the flattened leading dimensions: the adapter's part is added to these
            rows only, and every other row keeps the base's bytes (with RIFTCO_CHECK=1: verified).
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., N] in x's dtype. Under autocast x, W, bias, A and B are cast first.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, rows outside or twice.

    Devices: cpu, cuda (Triton; a dense base product is cuBLAS), mps and xla (plain torch).
    Numerics: the adapter's products run in the wider dtype of A and B (float32 adapters on bfloat16 rows: float32, as
        in PEFT), with float32 accumulation; base and adapter are added in float32 and rounded to x's dtype; gradients
        of A and B are accumulated in float32 and rounded once to the parameter's dtype. Deterministic.
    Source: Hu et al. 2021, "LoRA", equation 3; Kalajdzievski 2023, "rsLoRA".
    """
    dense = None if isinstance(weight, NF4Weight) else weight
    x, dense, bias, lora_a, lora_b = autocast(x, dense, bias, lora_a, lora_b)
    _check(x, weight, dense, lora_a, lora_b, bias, dropout_p, rows, impl)
    if rows is not None and checks_enabled():
        _check_rows(rows, x.shape[:-1].numel())
    keep = None
    if training and dropout_p > 0:
        keep = torch.rand(x.shape, device=x.device) >= dropout_p
    base: tuple = (dense, None, 0)
    if isinstance(weight, NF4Weight):
        base = (weight.codes, weight.scale, weight.block_size)
    args = (x, *base, bias, lora_a, lora_b, float(scale), keep, float(dropout_p), rows)
    if impl == "spec":
        return spec.forward(*args)[0]
    if needs_grad(x, dense, bias, lora_a, lora_b):
        return LoRAProduct.apply(*args)[0]
    return fwd(*args)[0]


def _check_rows(rows: Tensor, M: int) -> None:
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= M):
        raise IndexError(f"lora_linear: rows must be in [0, {M}); got {int(rows.min())}..{int(rows.max())}")
    if rows.unique().numel() != rows.numel():
        raise IndexError("lora_linear: rows must be distinct")


def _check(x, weight, dense, lora_a, lora_b, bias, dropout_p, rows, impl) -> None:
    if len(weight.shape) != 2:
        raise ValueError(f"lora_linear: weight must be [N, C]; got {tuple(weight.shape)}")
    N, C = weight.shape
    if x.dim() < 1 or not x.is_floating_point() or x.shape[-1] != C:
        raise ValueError(f"lora_linear: x must be floating [..., {C}]; got {x.dtype} {tuple(x.shape)}")
    if dense is not None and dense.dtype != x.dtype:
        raise ValueError(f"lora_linear: weight must have x's dtype {x.dtype}; got {dense.dtype}")
    if lora_a.dim() != 2 or lora_a.shape[1] != C or not lora_a.is_floating_point():
        raise ValueError(f"lora_linear: lora_a must be floating [R, {C}]; got {lora_a.dtype} {tuple(lora_a.shape)}")
    R = lora_a.shape[0]
    if not 1 <= R <= MAX_RANK:
        raise ValueError(f"lora_linear: the rank must be 1..{MAX_RANK}; got {R}")
    if tuple(lora_b.shape) != (N, R) or not lora_b.is_floating_point():
        raise ValueError(f"lora_linear: lora_b must be floating ({N}, {R}); got {lora_b.dtype} {tuple(lora_b.shape)}")
    if bias is not None and (tuple(bias.shape) != (N,) or not bias.is_floating_point()):
        raise ValueError(f"lora_linear: bias must be floating ({N},); got {bias.dtype} {tuple(bias.shape)}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"lora_linear: dropout_p must be in [0, 1]; got {dropout_p}")
    if rows is not None and (rows.dim() != 1 or rows.dtype != torch.int64):
        raise ValueError(f"lora_linear: rows must be int64 [L]; got {rows.dtype} {tuple(rows.shape)}")
    if impl not in (None, "spec"):
        raise ValueError(f"lora_linear: impl must be None or 'spec'; got {impl!r}")
    held = weight.codes if isinstance(weight, NF4Weight) else weight
    same_device("lora_linear", x=x, weight=held, lora_a=lora_a, lora_b=lora_b, bias=bias, rows=rows)
