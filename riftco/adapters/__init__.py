"""LoRA and QLoRA over a model's linear layers, embedding and head, and PEFT's adapter folders."""

from .lora import adapted, apply_lora
from .peft_config import read_spec
from .peft_files import adapter_state, base_weights_of, load_adapter, load_adapter_state, save_adapter
from .plan import shared_where_tied
from .spec import AdapterError, LoraSpec

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
    "shared_where_tied",
]
