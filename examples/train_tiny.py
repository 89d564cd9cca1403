"""Trains a small decoder from scratch: python examples/train_tiny.py --steps 200 --backend cpu|cuda|metal|tpu"""

import torch
from tiny_decoder import WOODS, TinyDecoder, arguments, batches

from riftco.optim import Adam

steps, device = arguments(__doc__)
torch.manual_seed(0)
model = TinyDecoder().to(device)
optimizer = Adam(model.parameters(), lr=3e-3, gradient_clip=1.0)
for step, (ids, target) in zip(range(1, steps + 1), batches(WOODS, device)):
    loss = model.loss(ids, target)
    loss.backward()
    norm, clip_scale = optimizer.step()
    optimizer.zero_grad()
    if step in (1, steps) or step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f} clip {clip_scale.item():.3f}")
