"""Launches rows.py and held.py; the contract is op.py."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._launch import as_rows, on
from .. import spec
from ..route import capability_of, of_call
from ..spec import no_metrics
from . import rows as kernels
from .held import held_rows, loss_rows
from .route import Held, held, once, plan

LARGEST_INT = 2**31 - 1
WHOLE = (0, 0, 0, 0)  # how held.py's rows lie that are in one piece
FEW = 1 << 17  # rows that one program counts


class Fixed(NamedTuple):
    """What options and a row's place decide, but no row: worked out once."""

    constants: dict[str, Any]  # of both kernels
    keep: int
    in_use: frozenset[str]  # as route.py takes them
    held: Held | None  # how held.py makes loss and gradient, where it does; of others' loss alone `once` says how


class _Rows(NamedTuple):
    """Logits as rows, and the numbers of the options as the kernels take them."""

    x: Tensor
    strides: tuple[int, int, int, int]  # inner, outer stride, inner stride, stride of a class
    row_weight: Tensor | None
    class_weight: Tensor | None
    weight_sum: Tensor | None
    numbers: tuple
    fixed: Fixed


def numbers_of(options: tuple) -> tuple:
    """ignore_index, smoothing, z_loss, cap, slope, s, scale"""
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    return (
        ignore_index, label_smoothing, z_loss, softcap or 1.0, logit_scale / (softcap or 1.0),
        1.0 if softcap else logit_scale, logit_scale,
    )  # fmt: skip


@functools.lru_cache(1024)
def fixed(
    V: int, stride: int, itemsize: int, aligned: bool, row_weight: bool, classes: bool, smooth: bool, softcap: bool,
    metrics: bool,
) -> Fixed:  # fmt: skip
    """aligned: rows begin at multiples of 16 bytes, their classes one behind the other."""
    plain = V % 16 == 0 and not (smooth or softcap)
    chosen = plan(V, itemsize, aligned, metrics, plain)
    lean = plain and aligned and itemsize == 2 and not (metrics or classes)
    constants = {
        "HAS_ROW_WEIGHT": row_weight, "CLASS": classes, "SMOOTH": smooth, "SOFTCAP": softcap,
        "WIDE": (V + chosen.R * chosen.T * chosen.E) * stride > LARGEST_INT,
        "R": chosen.R, "T": chosen.T, "E": chosen.E, "num_warps": chosen.warps,
    }  # fmt: skip
    used = {"metrics": metrics, "weight": classes, "softcap": softcap, "smoothing": smooth}
    in_use = frozenset(name for name, there in used.items() if there)
    return Fixed(constants, chosen.keep, in_use, held(V) if lean else None)


def held_constants(logits: Tensor, chosen: Held, early: bool = False) -> dict[str, Any]:
    return {**once_constants(logits, chosen), "EARLY": early, **_early(early)}


def once_constants(logits: Tensor, chosen: Held) -> dict[str, Any]:
    return {
        "CHUNKS": chosen.chunks, "HELD": chosen.held, "R": chosen.R, "T": chosen.T,
        "HALF": logits.dtype == torch.float16, "PACKED": _packed(logits), "num_warps": chosen.warps,
        "maxnreg": chosen.registers,
    }  # fmt: skip


def _early(early: bool) -> dict[str, bool]:
    """Triton's option for a kernel that may begin before the one ahead of it has ended."""
    return {"launch_pdl": True} if early else {}


def _begins_early(x: Tensor) -> bool:
    return x.is_cuda and capability_of(x.device) >= (9, 0)


def _packed(x: Tensor) -> bool:
    """Whether held.py may take two elements at once, by instructions of capability 8.0; the interpreter has none."""
    return opaque(x) and capability_of(x.device) >= (8, 0)


def _rows(logits, row_weight, class_weight, options: tuple, fresh: bool, metrics: bool = False) -> _Rows:
    """fresh: a gradient is written to contiguous rows of its own."""
    _, label_smoothing, _, softcap, _ = options
    V = logits.shape[-1]
    x, inner, outer, step = as_rows(logits)
    stride = x.stride(-1) if V > 1 else 1
    even = V % 16 == 0  # what Triton sees of integers
    aligned = stride == 1 and outer % 16 == step % 16 == x.data_ptr() % 16 == 0 and (even or not fresh)
    chosen = fixed(
        V, stride, x.dtype.itemsize, aligned, row_weight is not None, class_weight is not None, label_smoothing > 0,
        softcap > 0, metrics,
    )  # fmt: skip
    weight_sum = None if class_weight is None else class_weight.sum()
    row_weight = None if row_weight is None else row_weight.contiguous()
    strides = (inner, outer, step, stride)
    return _Rows(x, strides, row_weight, class_weight, weight_sum, numbers_of(options), chosen)


def per_row(t: Tensor | None) -> tuple[Tensor | None, int]:
    """(tensor, its stride over rows): 0 for the expanded scalar that a sum or mean sends back."""
    if t is None or all(s == 0 for s in t.stride()):
        return t, 0
    return t.contiguous(), 1


def opaque(x: Tensor) -> bool:
    """Whether what stays of a row in registers is read again through inline assembly, which the interpreter has not."""
    return x.is_cuda and x.element_size() == 2


def _forward(
    logits, target, row_weight, class_weight, d_loss, g: Tensor | None, options, metrics: bool, mean: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    """mean: d_loss is one over the labelled rows, which are counted here; behind the rest the mean and d_loss."""
    V, N, target = logits.shape[-1], target.numel(), target.contiguous()
    out = [torch.empty(target.shape, dtype=torch.float32, device=logits.device) for _ in range(5 if metrics else 3)]
    if metrics:
        out.append(torch.empty(target.shape, dtype=torch.int64, device=logits.device))
    beside = g is not None and g is not logits
    rows = _rows(logits, row_weight, class_weight, options, beside, metrics) if N and V else None
    early = mean and rows is not None and rows.fixed.held is not None and N <= FEW and _begins_early(logits)
    if mean:
        over, d_loss = _count(target, options[0], early)
    if rows is not None:
        _launch(logits, rows, target, d_loss, g, out, options, metrics, early)
    result = tuple(out) if metrics else (*out, *no_metrics(logits))
    return (*result, _mean(out[0], over, early), d_loss) if mean else result


def _launch(logits, rows: _Rows, target, d_loss, g: Tensor | None, out, options, metrics: bool, early: bool) -> None:
    V, N = logits.shape[-1], target.numel()
    inner, *x_strides = rows.strides
    if g is logits:  # as_rows must not have copied what is to be written over
        g_strides = x_strides
        if rows.x is not logits:
            raise ValueError("cross_entropy: inplace=True needs logits whose rows two strides describe")
    else:
        g_strides = [inner * V, V, 1]
    up, stride_up = per_row(d_loss)
    ring = of_call(rows.x, N, rows.strides[:3], rows.fixed.in_use).ring
    if g is not None and ring is not None:
        from . import hopper

        of_rows = hopper.Rows(target, rows.row_weight, up, stride_up, out, (options[0], options[2], options[4]))
        hopper.forward_backward(rows.x, rows.strides[:3], g, (g_strides[0], g_strides[1]), of_rows, ring)
        return
    if inner == N:  # one stride describes them: no row is divided
        inner, x_strides, g_strides = 1, [x_strides[1], 0, x_strides[2]], [g_strides[1], 0, g_strides[2]]
    with on(logits):
        if g is not None and rows.fixed.held is not None:
            ignore_index, _, z_loss, _, _, s, scale = rows.numbers
            held_rows[(N,)](
                rows.x, g, None, target, rows.row_weight, up, *out, 0, inner, *x_strides[:2], *g_strides[:2],
                stride_up, V, ignore_index, z_loss, s, scale, *WHOLE, SPAN=0, HAS_UP=up is not None,
                HAS_ROW_WEIGHT=rows.row_weight is not None, **held_constants(rows.x, rows.fixed.held, early),
            )  # fmt: skip
            return
        if g is None and rows.fixed.held is not None:
            ignore_index, _, z_loss, _, _, s, _ = rows.numbers
            loss_rows[(N,)](
                rows.x, target, rows.row_weight, *out, 0, inner, *x_strides[:2], V, ignore_index, z_loss, s,
                HAS_ROW_WEIGHT=rows.row_weight is not None, **once_constants(rows.x, once(V, N)),
            )  # fmt: skip
            return
        kernels.forward_rows[(N,)](
            rows.x, g, target, rows.row_weight, rows.class_weight, rows.weight_sum, up,
            *out, *[None] * (6 - len(out)), 0, inner, *x_strides, *g_strides, stride_up, V, *rows.numbers,
            GRAD=g is not None, HAS_UP=up is not None, METRICS=metrics, OPAQUE=opaque(rows.x),
            KEEP=rows.fixed.keep, **rows.fixed.constants,
        )  # fmt: skip


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    return _forward(logits, target, row_weight, class_weight, None, None, options, metrics)


def forward_backward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
    metrics: bool, inplace: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    g = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return *_forward(logits, target, row_weight, class_weight, d_loss, g, options, metrics), g


def forward_backward_(*args: Any) -> tuple[Tensor, ...]:
    """`forward_backward` over the logits, without returning them."""
    return functools.partial(forward_backward, inplace=True)(*args)[:-1]


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if d_logits.numel() == 0:
        return d_logits
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = _rows(logits, row_weight, class_weight, options, True)
    (up, stride_up), (up_lse, stride_lse) = per_row(d_loss), per_row(d_lse)
    with on(logits):
        kernels.backward_rows[(target.numel(),)](
            rows.x, d_logits, target.contiguous(), rows.row_weight, rows.class_weight, rows.weight_sum, up, up_lse,
            top.contiguous(), log_total.contiguous(), *rows.strides, stride_up, stride_lse, logits.shape[-1],
            *rows.numbers, HAS_UP=up is not None, HAS_UP_LSE=up_lse is not None, **rows.fixed.constants,
        )  # fmt: skip
    return d_logits


def mean_forward_backward_(
    logits: Tensor, g: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    g = logits if g.data_ptr() == logits.data_ptr() else g
    return _forward(logits, target, row_weight, class_weight, None, g, options, metrics, True)


def labelled(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return _count(target.contiguous(), ignore_index, False)


def _count(target: Tensor, ignore_index: int, followed: bool) -> tuple[Tensor, Tensor]:
    """followed: the kernel launched next begins early, and everything launched before this has ended by then."""
    if target.numel() > FEW:
        return spec.labelled(target, ignore_index)
    over, reciprocal = (torch.empty((), dtype=torch.float32, device=target.device) for _ in range(2))
    with on(target):
        kernels.count_labelled[(1,)](
            target, over, reciprocal, target.numel(), ignore_index, BLOCK=8192, FOLLOWED=followed, num_warps=16
        )
    return over, reciprocal


def _mean(loss: Tensor, over: Tensor, early: bool) -> Tensor:
    if loss.numel() > FEW:
        return loss.sum() / over
    mean = torch.empty((), dtype=torch.float32, device=loss.device)
    with on(loss):
        kernels.mean_of[(1,)](
            loss, over, mean, loss.numel(), BLOCK=8192, EARLY=early, num_warps=32, **_early(early)
        )  # fmt: skip
    return mean


def places(target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """spec.places, in one launch where no more than FEW rows are."""
    if target.numel() > FEW:
        return spec.places(target, row_weight, ignore_index)
    reciprocal = torch.empty((), dtype=torch.float32, device=target.device)
    out = torch.empty(3, dtype=torch.int64, device=target.device)
    row_weight = None if row_weight is None else row_weight.contiguous()
    with on(target):
        kernels.place_labelled[(1,)](
            target.contiguous(), row_weight, reciprocal, out, target.numel(), ignore_index,
            HAS_ROW_WEIGHT=row_weight is not None, BLOCK=8192, num_warps=16,
        )  # fmt: skip
    return reciprocal, out


def scale_(g: Tensor, scale: Tensor) -> None:
    """g *= scale, read on the device; g is one piece of memory."""
    if g.numel():
        early = _begins_early(g)  # only the launch: it waits for all that came before
        with on(g):
            kernels.scale_unless_one[(min(264, -(-g.numel() // 8192)),)](
                g, scale, g.numel(), BLOCK=8192, EARLY=early, num_warps=8, **_early(early)
            )
