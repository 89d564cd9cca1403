from .op import dequantize_nf4, nf4_linear
from .quantize import quantize_nf4
from .weight import NF4Weight

__all__ = ["NF4Weight", "dequantize_nf4", "nf4_linear", "quantize_nf4"]
