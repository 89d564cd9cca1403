"""What a call of a module does: who goes round it, or leaves work out of it, must know who else sees it."""

from torch import nn


def hooked(module: nn.Module) -> bool:
    """Whether a hook of the module's own sees its calls, forward or backward; FSDP2's blocks have some."""
    m = module
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def own_call(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module runs the forward of `kind`, and no hook of its own is given what comes out."""
    return (
        type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not module._forward_hooks
    )


def plain_call(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is the forward of `kind` and nothing else, so that one may go round it."""
    return own_call(module, kind) and not hooked(module)


def sole_call(module: nn.Module, kind: type[nn.Module]) -> bool:
    """`plain_call` of a module of just this class, in whose children no hook is either."""
    if type(module) is not kind or not plain_call(module, kind):
        return False
    return not any(
        hooked(child) for child in module._modules.values() if child is not None
    )  # without their names' cost
