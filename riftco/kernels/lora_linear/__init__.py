from .op import lora_linear, lora_linear_group

__all__ = ["lora_linear", "lora_linear_group"]
