from .op import dequantize_gguf, gguf_linear
from .weight import GGUFWeight

__all__ = ["GGUFWeight", "dequantize_gguf", "gguf_linear"]
