"""LoRA and QLoRA over a model's linear layers, embedding and head, and PEFT's adapter folders."""

from .gguf_lora import save_gguf_lora
from .lora import adapted, apply_lora
from .merge import Merged, merge_adapter
from .peft_config import read_spec
from .peft_files import adapter_state, base_weights_of, load_adapter, load_adapter_state, save_adapter
from .plan import shared_where_tied, unmatched
from .spec import AdapterError, LoraSpec

__all__ = [
    "AdapterError",
    "LoraSpec",
    "Merged",
    "adapted",
    "adapter_state",
    "apply_lora",
    "base_weights_of",
    "load_adapter",
    "load_adapter_state",
    "merge_adapter",
    "read_spec",
    "save_adapter",
    "save_gguf_lora",
    "shared_where_tied",
    "unmatched",
]
