"""Learns one text in full, then another through LoRA: python examples/lora.py --steps 200 --backend cpu"""

import torch
from tiny_decoder import HARBOUR, WOODS, TinyDecoder, arguments, train

from riftco.nn import LoRALinear

steps, device = arguments(__doc__)
torch.manual_seed(0)
model = TinyDecoder().to(device)
print("all weights, first text")
train(model, WOODS, 3e-3, steps, device)

model.requires_grad_(False)
for block in model.blocks:
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        setattr(block, name, LoRALinear(getattr(block, name), rank=8, alpha=16))
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"adapters only ({trainable} of {sum(p.numel() for p in model.parameters())} numbers), second text")
train(model, HARBOUR, 1e-2, steps, device)
