"""The optimizer around `adam_step`: torch.optim's interface and state_dict."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from . import op

THEIRS = ("amsgrad", "maximize", "differentiable", "foreach", "capturable", "fused")  # torch's options, not ours


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
        state: "contiguous" keeps each moment in one tensor shaped as its parameter.

    Raises:
        ValueError: options, parameters or gradients that do not fit, each named; sparse gradients.
    """

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
    ):
        if state != "contiguous":
            raise ValueError(f"Adam: state {state!r} is not supported; supported: 'contiguous'")
        op.check_options(lr, betas, eps, weight_decay, gradient_clip)
        self.gradient_clip = gradient_clip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            op.check_options(group["lr"], group["betas"], group["eps"], group["weight_decay"], None)
            for i, p in enumerate(group["params"]):
                if p.dtype not in op.DTYPES:
                    raise ValueError(f"Adam: parameter {i} of the group must be floating; got {p.dtype}")
        except ValueError:
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
        norm, scale, committed = op.norm(grads, self.gradient_clip)
        for group, params in groups:
            for double in (False, True):  # the two kinds of accumulation do not mix in one launch
                some = [p for p in params if (p.dtype == torch.float64) == double]
                if not some:
                    continue
                states = [self._state(p) for p in some]
                m, v, count = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
                rate = op.rate_tensor(group["lr"], m)
                rest = *group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"]
                op.step(some, [p.grad for p in some], m, v, count, committed, scale.to(m[0].dtype), rate, *rest)
        return norm, scale

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            acc = torch.promote_types(p.dtype, torch.float32)
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, dtype=acc, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=acc, memory_format=torch.preserve_format)
        return state

    def _check(self, groups, device) -> None:
        """Before anything is changed."""
        for n, (_, params) in enumerate(groups):
            for p in params:
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"Adam: sparse gradients are not supported; a parameter {tuple(p.shape)} of group {n} has one"
                    )
                if p.device != device:
                    raise ValueError(f"Adam: all parameters must be on one device; got {device} and {p.device}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.optim.AdamW or Adam (not amsgrad or maximize).

        torch's own loading would cast the moments to the parameters' dtype; here they stay float32.
        """
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize", "differentiable"):
                if group.get(option):
                    raise ValueError(f"Adam: a state saved with {option}=True cannot be continued")
        decoupled = [group["decoupled_weight_decay"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, ours in zip(self.param_groups, decoupled):
            group.setdefault("decoupled_weight_decay", ours)
            for option in THEIRS:
                group.pop(option, None)
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, p in zip(names, params):
            saved = state_dict["state"].get(name)
            if saved:
                self.state.pop(p, None)
                state = self._state(p)
                state["step"].copy_(torch.as_tensor(saved["step"]))
                state["exp_avg"].copy_(saved["exp_avg"])
                state["exp_avg_sq"].copy_(saved["exp_avg_sq"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "gradient_clip": self.gradient_clip}
