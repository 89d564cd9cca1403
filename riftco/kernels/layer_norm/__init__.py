from .op import layer_norm

__all__ = ["layer_norm"]
