from .op import cross_entropy

__all__ = ["cross_entropy"]
