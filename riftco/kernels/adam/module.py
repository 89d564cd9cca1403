"""The optimizer around the Adam ops: torch's interface and state_dict."""

import functools
from collections.abc import Callable, Iterable
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from .._arguments import flags, floating, given, whole
from .._contract import write
from . import op, quantized, sharded
from .pages import Passage, Pool
from .sharded import as_shard, is_shard, local, own_part

THEIRS = ("amsgrad", "maximize", "differentiable", "foreach", "capturable", "fused")  # torch's options, not ours
STATES = ("contiguous", "paged", "paged-8bit")
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
CODED = ("state1", "state2", "absmax1", "absmax2")  # bitsandbytes' names
WRAPPED = "__bnb_optimizer_quant_state__"  # where its state_dict keeps them


class Adam(torch.optim.Optimizer):
    """AdamW (or Adam with L2, decoupled=False) whose step is transactional and returns its gradient norm.

    A step whose gradients are not all finite changes nothing: parameters, moments and step counts stay as they are.
    That is decided on the device; the host never waits. Moments are float32 for parameters of at most 32 bit. Loads and
    saves torch.optim.AdamW's state_dict.

    Args:
        params: parameters or groups; a group may have its own lr, betas, eps and weight_decay. One device.
        lr: a float, or a scalar tensor.
        betas, eps, weight_decay: as torch.optim.AdamW (weight_decay is 0 unless given).
        decoupled: True decays the parameter (AdamW), False adds weight_decay * parameter to the gradient (Adam).
        gradient_clip: largest global norm over all groups, or None.
        state: "contiguous" keeps each moment in one tensor shaped as its parameter; "paged" in pages, with results that
            are bit-equal; "paged-8bit" in pages of 8-bit codes with a float32 scale for each 256 elements, as
            bitsandbytes' Adam8bit: a quarter of the memory. There tensors below 4,096 elements keep float32.
        page_size: elements of a page, a multiple of 256. Pages are allocated, and brought from the host, in slabs of
            8 MiB.
        device_bytes: how many bytes of pages stay on the parameters' device (None: all). The others lie in host memory,
            pinned for a CUDA device, and pass through three slabs there while the step runs.

    A paged state_dict holds the moments whole, in host memory; an 8-bit one the codes by bitsandbytes' names (step,
    state1, state2, absmax1, absmax2). Each form loads any form.

    Parameters may be DTensors cut over one mesh, as torch.distributed.fsdp.fully_shard leaves them: each process
    updates what it holds, the norm and the decision to commit are those of all. Their moments are DTensors in the
    state_dict, and whole ones load too. "paged-8bit" is refused: its blocks would depend on the number of processes.

    Raises:
        ValueError: options, parameters or gradients that do not fit, each named; sparse gradients.
    """

    group: Any = None  # of processes that hold the parameters together, where they are DTensors

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        gradient_clip: float | None = None,
        state: str = "contiguous",
        page_size: int = 4096,
        device_bytes: int | None = None,
    ):
        if state not in STATES:
            raise ValueError(f"Adam: state must be one of {', '.join(STATES)}; got {state!r}")
        whole("Adam", "page_size", page_size, f"a multiple of {quantized.BLOCK}", least=quantized.BLOCK)
        if page_size % quantized.BLOCK:
            raise ValueError(f"Adam: page_size must be a multiple of {quantized.BLOCK}; got {page_size}")
        if device_bytes is not None:
            whole("Adam", "device_bytes", device_bytes, "0 or more, of a paged state", least=0)
            if state == "contiguous":
                raise ValueError(
                    f"Adam: device_bytes must be 0 or more, of a paged state; got {device_bytes}, {state!r}"
                )
        flags("Adam", decoupled=decoupled)
        op.check_options(lr, betas, eps, weight_decay, gradient_clip)
        self.gradient_clip = gradient_clip
        self.form, self.page_size, self.device_bytes = state, page_size, device_bytes
        self.pools: dict[torch.dtype, Pool] = {}
        self.passage: Passage | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            op.check_options(group["lr"], group["betas"], group["eps"], group["weight_decay"], None)
            for i, p in enumerate(group["params"]):
                if not floating(p):
                    raise ValueError(f"Adam: parameter {i} of the group must be floating; got {given(p)}")
                if p.device.type == "xla" and self.form != "contiguous":
                    raise ValueError(f"Adam: state={self.form!r} has no kernel for xla; use state='contiguous'")
                if is_shard(p) and self.form == "paged-8bit":
                    raise ValueError("Adam: state='paged-8bit' cannot hold DTensors; use state='paged'")
            self.group = sharded.group_of(p for g in self.param_groups for p in g["params"])
            every = {
                f"parameter {i} of group {n}": local(p)
                for n, g in enumerate(self.param_groups)
                for i, p in enumerate(g["params"])
            }
            op.check_written("Adam", every)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """One update.

        Args:
            closure: evaluated first, with gradients enabled, as torch's optimizers do.

        Returns:
            (gradient_norm, clip_scale) of this update, scalars on the device; a refused update has clip_scale 0.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        grads = [p.grad for _, params in groups for p in params]
        if not grads:
            device = self.param_groups[0]["params"][0].device if self.param_groups[0]["params"] else None
            return torch.zeros((), device=device), torch.ones((), device=device)
        self._check(groups, grads[0].device)
        self._allocate([p for _, params in groups for p in params])
        hosted = self._fetch([p for _, params in groups for p in params])
        own = op.norm([local(g) for g in grads], self.gradient_clip)
        norm, scale, committed = sharded.of_all(own, self.gradient_clip, self.group)
        updates = []  # (parameters of one kind of accumulation, what an update of them needs)
        for group, params in groups:
            for acc in dict.fromkeys(_accumulation(p) for p in params):
                some = [p for p in params if _accumulation(p) == acc]
                rate = op.rate_tensor(group["lr"], acc, grads[0].device)
                rest = *group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"]
                updates.append((some, (committed, scale.to(acc), rate, *rest)))
        for params, options in updates:
            states = [self.state[p] for p in params]
            count = [s["step"] for s in states]
            if self.form == "contiguous":
                m, v = ([s[name] for s in states] for name in MOMENTS)
                here, gradients = [local(p) for p in params], [local(p.grad) for p in params]
                write(op.step, grads[0].device, here, gradients, m, v, count, *options)
            else:
                write(op.advance, grads[0].device, count, committed)
        if self.form != "contiguous":
            self._step_pages(updates, hosted)
        return norm, scale

    def _step_pages(self, updates, hosted: list[tuple[Pool, int]]) -> None:
        for pool in self.pools.values():
            resident = [(s, start) for s, start, away in zip(pool.slabs, pool.starts, pool.hosted) if not away]
            if resident:
                self._update(updates, pool, *zip(*resident))

        def arrived(k: int, slab: Tensor) -> None:
            pool, at = hosted[k]
            self._update(updates, pool, [slab], [pool.starts[at]])

        if hosted:
            assert self.passage is not None
            self.passage.run(arrived)

    def _update(self, updates, pool: Pool, slabs, starts) -> None:
        """The updates of all elements whose pages lie in these slabs."""
        low, high, page_size = starts[0], starts[-1] + pool.pages_in(slabs[-1]), self.page_size
        for params, options in updates:
            mine = [p for p in params if self._pool(p) is pool]
            states, some = [self.state[p] for p in mine], [local(p) for p in mine]
            grads = [local(p.grad) for p in mine]
            if low > 0 or high < pool.pages:  # only some of the pool's pages
                ends = [s["page"] + -(-p.numel() // page_size) for s, p in zip(states, some)]
                near = [s["page"] < high and end > low for s, end in zip(states, ends)]
                states, some, grads = (list(compress(each, near)) for each in (states, some, grads))
            if some:
                firsts, count = ([s[key] for s in states] for key in ("page", "step"))
                op.paged_step(some, grads, list(slabs), list(starts), firsts, self.page_size, count, *options)

    def _fetch(self, params: list[Tensor]) -> list[tuple[Pool, int]]:
        """(pool, slab) of what lies in host memory and is needed now; the first ones are on their way."""
        if not any(any(pool.hosted) for pool in self.pools.values()):
            return []
        needed = dict.fromkeys(
            (self._pool(p), at) for p in params for at in self._pool(p).touched(self.state[p]["page"], local(p).numel())
        )
        hosted = [(pool, at) for pool, at in needed if pool.hosted[at]]
        if hosted:
            self.passage = self.passage or Passage(params[0].device)
            self.passage.begin([pool.slabs[at] for pool, at in hosted])
        return hosted

    def _pool(self, p: Tensor) -> Pool:
        coded = self.form == "paged-8bit" and p.numel() >= quantized.SMALLEST and p.dtype != torch.float64
        dtype = torch.uint8 if coded else _accumulation(p)
        if dtype not in self.pools:
            self.pools[dtype] = Pool(self.page_size, dtype, p.device, self._left)
        return self.pools[dtype]

    def _left(self) -> int | None:
        """Bytes that more pages may take on the device."""
        if self.device_bytes is None:
            return None
        return self.device_bytes - sum(pool.resident_bytes for pool in self.pools.values())

    def _allocate(self, params: list[Tensor]) -> None:
        """State of those parameters that have none."""
        fresh = [p for p in params if not self.state[p]]
        for p in fresh:
            # on XLA zeros that are made there would be part of the first step's graph, and no other's
            like = torch.empty(p.shape) if p.device.type == "xla" else local(p)
            self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=like.device).to(p.device)
            if self.form == "contiguous":
                for name in MOMENTS:
                    zeros = torch.zeros_like(like, dtype=_accumulation(p), memory_format=torch.preserve_format)
                    self.state[p][name] = zeros.to(p.device)
        if self.form != "contiguous":
            for pool in dict.fromkeys(self._pool(p) for p in fresh):
                some = [p for p in fresh if self._pool(p) is pool]
                for p, first in zip(some, pool.grow([local(p).numel() for p in some])):
                    self.state[p]["page"] = first

    def _check(self, groups, device) -> None:
        """Before anything is changed. Schedulers write into the groups, so that these are looked at again."""
        for n, (group, params) in enumerate(groups):
            op.check_options(group["lr"], group["betas"], group["eps"], group["weight_decay"], self.gradient_clip)
            for p in params:
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"Adam: sparse gradients are not supported; a parameter {tuple(p.shape)} of group {n} has one"
                    )
                if p.device != device:
                    raise ValueError(f"Adam: all parameters must be on one device; got {device} and {p.device}")

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        numbers = {p: n for n, p in enumerate(chain.from_iterable(g["params"] for g in self.param_groups))}
        if self.form == "contiguous":
            for p, state in self.state.items():
                if is_shard(p):
                    packed["state"][numbers[p]] = {k: as_shard(v, p) if k in MOMENTS else v for k, v in state.items()}
            return packed
        if self.passage is not None:
            self.passage.lanes.finish()
        for p, state in self.state.items():
            pool, shape = self._pool(p), local(p).shape
            values = pool.read(state["page"], local(p).numel())
            if len(values) == len(CODED):
                whole = dict(zip(CODED, (*(c.view(shape) for c in values[:2]), *values[2:])))
            else:
                whole = dict(zip(MOMENTS, (as_shard(m.view(shape), p) for m in values)))
            packed["state"][numbers[p]] = {"step": state["step"], **whole}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class in any form, of torch.optim.AdamW or Adam (not amsgrad or maximize), or of
        bitsandbytes' 8-bit AdamW.

        torch's own loading would cast the moments to the parameters' dtype; here they stay float32.
        """
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize", "differentiable"):
                if group.get(option):
                    raise ValueError(f"Adam: a state saved with {option}=True cannot be continued")
        self._check_state(state_dict)
        decoupled = [group["decoupled_weight_decay"] for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})
        for group, ours in zip(self.param_groups, decoupled):
            group.setdefault("decoupled_weight_decay", ours)
            for option in THEIRS:
                group.pop(option, None)
        if self.passage is not None:
            self.passage.lanes.finish()
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        pairs = [(p, state_dict["state"][n]) for n, p in zip(names, params) if state_dict["state"].get(n)]
        self.pools.clear()
        self.state.clear()
        self._allocate([p for p, _ in pairs])
        for p, saved in pairs:
            self._load(p, {k: v for k, v in saved.items() if k != WRAPPED} | saved.get(WRAPPED, {}))

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """Refuse what does not fit the parameters while the state that is there is still whole."""
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for n, p in zip(names, params):
            saved = state_dict["state"].get(n)
            if not saved:
                continue
            saved = {k: v for k, v in saved.items() if k != WRAPPED} | saved.get(WRAPPED, {})
            moments = MOMENTS if "exp_avg" in saved else CODED[:2]
            if lacking := [name for name in ("step", *moments) if name not in saved]:
                raise ValueError(f"Adam: the state of parameter {n} lacks {', '.join(lacking)}")
            for name in moments:
                if saved[name].numel() != p.numel():
                    raise ValueError(
                        f"Adam: {name} of parameter {n} has {saved[name].numel()} values; the parameter "
                        f"{tuple(p.shape)} has {p.numel()}"
                    )
            if moments == CODED[:2] and saved["state1"].dtype == torch.uint8:
                blocks = -(-p.numel() // quantized.BLOCK)
                for name in CODED[2:]:
                    scales = saved.get(name)
                    if not floating(scales) or scales.numel() != blocks:
                        raise ValueError(
                            f"Adam: {name} of parameter {n} must be floating [{blocks}], one a block of "
                            f"{quantized.BLOCK} values; got {given(scales)}"
                        )

    def _load(self, p: Tensor, saved: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"].copy_(torch.as_tensor(saved["step"]))
        coded = saved.get("state1")
        coded = coded is not None and coded.dtype == torch.uint8
        names = MOMENTS if "exp_avg" in saved else CODED[:2]
        into_codes = self.form != "contiguous" and self._pool(p).dtype == torch.uint8
        if coded and into_codes:
            values = [saved[name].reshape(-1) for name in CODED]
        else:
            values = [saved[name] for name in names]
            if coded:
                scales = (saved[name] for name in CODED[2:])
                values = [quantized.decoded(v.reshape(-1), *x) for v, *x in zip(values, scales, (True, False))]
            values = [own_part(v, p).reshape(-1) for v in values]
            if into_codes:
                codes, absmax = zip(*(quantized.encoded(x, s) for x, s in zip(values, (True, False))))
                values = [*codes, *absmax]
        if self.form == "contiguous":
            for name, value in zip(MOMENTS, values):
                state[name].copy_(value.view(state[name].shape))
        else:
            self._pool(p).write(state["page"], local(p).numel(), values)

    def __getstate__(self) -> dict[str, Any]:
        if self.passage is not None:
            self.passage.lanes.finish()
        ours = ("gradient_clip", "form", "page_size", "device_bytes", "pools")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ours}, "passage": None}


def _accumulation(p: Tensor) -> torch.dtype:
    return _wide(p.dtype)


@functools.cache  # an operator's call each time, for every parameter of a step, and a trainer watches each one
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
