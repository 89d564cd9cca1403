from .op import geglu, swiglu

__all__ = ["geglu", "swiglu"]
