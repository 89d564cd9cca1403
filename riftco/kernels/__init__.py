"""One room per op; see DESIGN.md."""

ROOMS = (
    "adam",
    "attention",
    "cached_attention",
    "cross_entropy",
    "embedding",
    "layer_norm",
    "gguf_linear",
    "linear_cross_entropy",
    "lora_linear",
    "nf4",
    "rms_norm",
    "rope",
    "swiglu",
)
