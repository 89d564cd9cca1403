from .op import lora_linear

__all__ = ["lora_linear"]
