"""What a call of a module does: who goes round it, or leaves work out of it, must know who else sees it."""

from torch import nn


def own_call(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module runs the forward of `kind`, and no hook of its own is given what comes out."""
    return (
        type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not module._forward_hooks
    )


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is the forward of `kind` and nothing else, so that one may go round it."""
    hooks = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return own_call(module, kind) and not hooks
