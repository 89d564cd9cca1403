"""As lora.py, but the frozen weights are held in 4 bits: python examples/qlora.py --steps 200 --backend cpu"""

import torch
from tiny_decoder import HARBOUR, WOODS, TinyDecoder, arguments, train

from riftco.nn import LoRALinear, NF4Linear

steps, device = arguments(__doc__)
torch.manual_seed(0)
model = TinyDecoder().to(device)
print("all weights, first text")
train(model, WOODS, 3e-3, steps, device)

model.requires_grad_(False)
before = after = 0
for block in model.blocks:
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        linear = getattr(block, name)
        quantised = NF4Linear.from_linear(linear)
        before += linear.weight.nbytes
        after += quantised.weight.codes.nbytes + quantised.weight.absmax.nbytes
        setattr(block, name, LoRALinear(quantised, rank=8, alpha=16))
print(f"adapters over NF4 (weights {before} -> {after} bytes), second text")
train(model, HARBOUR, 1e-2, steps, device)
