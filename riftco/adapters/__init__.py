"""LoRA and QLoRA over a model's linear layers, and PEFT's adapter folders."""

from .lora import AdapterError, LoraSpec, adapted, apply_lora
from .peft_files import adapter_state, base_weights_of, load_adapter, load_adapter_state, read_spec, save_adapter

__all__ = [
    "AdapterError",
    "LoraSpec",
    "adapted",
    "adapter_state",
    "apply_lora",
    "base_weights_of",
    "load_adapter",
    "load_adapter_state",
    "read_spec",
    "save_adapter",
]
