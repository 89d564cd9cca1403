"""Optimizers."""

from .kernels.adam.module import Adam

__all__ = ["Adam"]
