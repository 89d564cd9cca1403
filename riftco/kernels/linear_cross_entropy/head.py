"""The head: logits of a slice, the way back to x, and sums of weight gradients over slices. torch.mm does the work."""

import torch
from torch import Tensor

from .._contract import launcher, meaning
from .._matmul import matmul, through_onednn
from .plan import Filled
from .problem import Problem

LINE = 64  # elements: rows of a buffer lie at multiples of it, as matmuls and loads of odd rows are slow
EVEN = 8  # classes: cuBLAS takes 5 to 8 times as long for sizes that are no multiple of it
WORTH_FROM = 4096  # classes
ALL = slice(None)
NARROW_AT_ONCE = 8 << 20  # bytes of a 16-bit gradient widened at once where a matmul cannot give float32


class Head:
    """z = x W^T + bias + scale (x A^T) B^T, with W dense or frozen. The adapter's part is written first and W's product
    added to it in float32: of two roundings to 16 bit, one is of the small part only."""

    def __init__(self, p: Problem, onednn: bool = False, filled: Filled | None = None):
        """onednn: the device's float32 products go there, and have memory of their own."""
        self.p, self.filled = p, filled
        self.apart = onednn and not p.frozen and through_onednn(p.x, p.weight)
        self.a = None if p.lora_a is None else p.lora_a.to(p.x.dtype)
        self.b = None if p.lora_b is None else (p.lora_b.to(p.acc) * p.lora_scale).to(p.x.dtype)  # scale is in it
        self.buffer: Tensor | None = None
        self.across = p.weight if p.frozen else p.weight.t()  # [C, V], made once: of small slices Python takes most

    def row_bytes(self, x_is_view: bool, d_x_in_place: bool) -> int:
        """What a row of a slice holds beside its logits' own: gathered x, its gradient, the adapter's inner rows."""
        p = self.p
        copies = (not x_is_view) + (p.frozen or not d_x_in_place) + self.apart
        return p.x.dtype.itemsize * (copies * p.C + 2 * self.rank + self.width - p.V)

    @property
    def width(self) -> int:
        """Elements from a row of the buffer to the next."""
        return -(-self.p.V // LINE) * LINE if not self.p.frozen and _pays(self.p.V, self.p.x) else self.p.V

    def reserve(self, rows: int) -> None:
        """One buffer for every slice; products of a frozen weight and of oneDNN bring their own."""
        if not (self.p.frozen or self.apart):
            width, V = self.width, self.p.V
            whole = self.p.x.new_empty(rows, width)
            self.buffer = whole if width == V else whole[:, :V]

    def inner(self, x: Tensor) -> Tensor | None:
        return None if self.a is None else torch.mm(x, self.a.t())

    def logits(self, x: Tensor, inner: Tensor | None) -> Tensor:
        p = self.p
        if p.frozen:
            z = p.base.forward(x, p.bias, launcher)
            return z if inner is None or self.b is None else z.addmm_(inner, self.b.t())
        if self.buffer is None:
            z = matmul(x, p.weight, p.bias)
            return z if inner is None or self.b is None else z.addmm_(inner, self.b.t())
        n, z, w = x.shape[0], self.buffer, self.across
        z = z if n == z.shape[0] else z[:n]
        if inner is not None and self.b is not None:
            _affine(inner, self.b.t(), p.bias, z)
            for part in _parts(p.V, z):
                _cut(z, part).addmm_(x, _cut(w, part))
            return z
        return _affine(x, w, p.bias, z)

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    def logits_of(self, x: Tensor, inner: Tensor | None, block: slice, out: Tensor) -> Tensor:
        """The logits of a block of a dense head's classes."""
        w, bias = self.p.weight[block].t(), None if self.p.bias is None else self.p.bias[block]
        if inner is not None and self.b is not None:
            return _affine(inner, self.b[block].t(), bias, out).addmm_(x, w)
        return _affine(x, w, bias, out)

    def d_inner(self, g: Tensor) -> Tensor | None:
        return None if self.b is None else _product(g, self.b.t(), g.new_empty(g.shape[0], self.rank))

    def d_x(self, g: Tensor, d_inner: Tensor | None, out: Tensor) -> None:
        parts = (ALL,) if self.filled is None else self.filled.parts(g.shape[0])
        if len(parts) == 1:
            self._d_x(g, d_inner, out)
        else:
            for part in parts:
                self._d_x(g[part], None if d_inner is None else d_inner[part], out[part])

    def _d_x(self, g: Tensor, d_inner: Tensor | None, out: Tensor) -> None:
        p = self.p
        if p.frozen:
            out.copy_(p.base.backward(g, launcher))
            if d_inner is not None and self.a is not None:
                out.addmm_(d_inner, self.a)
        elif d_inner is not None and self.a is not None:
            torch.mm(d_inner, self.a, out=out)
            _product(g, self.across, out, more=True)
        elif self.apart:
            out.copy_(matmul(g, self.across))
        else:
            _product(g, self.across, out)


def _pays(classes: int, like: Tensor) -> bool:
    return classes >= WORTH_FROM and like.device.type in ("cpu", "cuda")


def _parts(classes: int, like: Tensor) -> tuple[slice, ...]:
    """All classes, the last few of an odd number apart."""
    odd = classes % EVEN
    return (slice(0, classes - odd), slice(classes - odd, classes)) if odd and _pays(classes, like) else (ALL,)


def _cut(t: Tensor, part: slice) -> Tensor:
    """Classes of [.., V]; a view of all of them would cost the host half of what a launch does."""
    return t if part is ALL else t[..., part]


def _affine(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = x w + bias, w [.., V]."""
    for part in _parts(w.shape[1], x):
        if bias is None:
            torch.mm(x, _cut(w, part), out=_cut(out, part))
        else:
            torch.addmm(_cut(bias, part), x, _cut(w, part), out=_cut(out, part))
    return out


def _product(g: Tensor, w: Tensor, out: Tensor, more: bool = False) -> Tensor:
    """out = g w^T, g [n, V], w [.., V], plus out itself if `more`; of an odd V the few classes come first and are
    rounded alone."""
    for part in reversed(_parts(w.shape[1], g)):
        if more:
            out.addmm_(_cut(g, part), _cut(w, part).t())
        else:
            matmul(_cut(g, part), _cut(w, part), out=out)
        more = True
    return out


class Sum:
    """sum over slices of g^T x, in `dtype`; the first slice overwrites, so that nothing is cleared."""

    def __init__(self, like: Tensor, shape: tuple[int, int], dtype: torch.dtype, wanted: bool):
        self.total = like.new_empty(shape if wanted else 0, dtype=dtype)
        self.wanted, self.begun = wanted, False

    def add(self, g: Tensor | None, x: Tensor | None) -> None:
        if not self.wanted:
            return
        assert g is not None and x is not None
        accumulate(self.total, g, x, self.begun)
        self.begun = True

    def result(self, dtype: torch.dtype, factor: Tensor | float | None = None) -> Tensor:
        """The sum times factor in `dtype`; the float32 sum is narrowed inside its own memory."""
        if self.wanted and not self.begun:
            self.total.zero_()
        if factor is not None and self.wanted:
            scale_(self.total, factor)
        return _narrowed(self.total, dtype)


def scale_(g: Tensor, factor: Tensor | float) -> None:
    """g *= factor, the product in float32: a GPU would round a tensor of no dimensions to g's dtype, 2 ** 16 of a
    float16 gradient to infinity."""
    if isinstance(factor, Tensor):
        found = meaning if g.device.type == "xla" else launcher  # XLA has none of its own
        found("linear_cross_entropy_scale_", g)(g, factor)
    else:
        g.mul_(factor)


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """wide in a narrower dtype, written over wide's own front: element i lands before byte 4 i, which was read already.

    Stretches double, so that a stretch [lo, 2 lo) of results never touches the elements it is read from.
    """
    if wide.dtype == dtype:
        return wide
    if wide.dtype.itemsize != 2 * dtype.itemsize or wide.device.type == "xla" or wide.numel() == 0:
        return wide.to(dtype)
    source, n = wide.view(-1), wide.numel()
    target = source.view(dtype)[:n]
    target[:1] = source[:1].clone()
    lo = 1
    while lo < n:
        hi = min(2 * lo, n)
        target[lo:hi] = source[lo:hi]
        lo = hi
    return target.view(wide.shape)


def accumulate(total: Tensor, g: Tensor, x: Tensor, more: bool) -> None:
    """total = g^T x, plus total itself if `more`, in total's dtype."""
    for part in _parts(g.shape[1], g):
        add_product(total[part], g[:, part], x, more)


def add_product(total: Tensor, g: Tensor, x: Tensor, more: bool) -> None:
    """`accumulate` in one product, for columns of g that are not classes."""
    if total.dtype == g.dtype and more:
        total.addmm_(g.t(), x)
    elif total.dtype == g.dtype:
        torch.mm(g.t(), x, out=total)
    elif g.is_cuda:  # 16-bit operands, float32 result: one matmul, no wider copy
        if more:
            torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
        else:
            torch.mm(g.t(), x, out_dtype=total.dtype, out=total)
    else:
        wide = x.to(total.dtype)
        step = max(1, NARROW_AT_ONCE // (4 * max(1, g.shape[0])))  # widen g a few columns at a time
        for lo in range(0, g.shape[1], step):
            columns = slice(lo, lo + step)
            out, narrow = total[columns], g[:, columns].t().to(total.dtype)
            if more:
                out.addmm_(narrow, wide)
            else:  # not addmm with beta=0, which torch_xla leaves to the CPU
                torch.mm(narrow, wide, out=out)
