from .op import adam_step

__all__ = ["adam_step"]
