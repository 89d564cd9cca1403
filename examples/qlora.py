"""As lora.py, but the frozen weights are held in 4 bits: python examples/qlora.py --steps 200 --backend cpu"""

import torch
from tiny_decoder import HARBOUR, WOODS, TinyDecoder, arguments, batches

from riftco.nn import LoRALinear, NF4Linear
from riftco.optim import Adam


def train(model, text, lr):
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=lr, gradient_clip=1.0)
    for step, (ids, target) in zip(range(1, steps + 1), batches(text, device)):
        loss = model.loss(ids, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, steps) or step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


steps, device = arguments(__doc__)
torch.manual_seed(0)
model = TinyDecoder().to(device)
print("all weights, first text")
train(model, WOODS, lr=3e-3)

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
train(model, HARBOUR, lr=1e-2)
