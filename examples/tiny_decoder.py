"""What the examples share: a byte-level decoder on riftco's ops, its training, text, and the choice of a device."""

import argparse
import importlib.util
import sys

import torch
from torch import nn

import riftco.functional as F
from riftco.data import WindowSampler
from riftco.nn import RMSNorm
from riftco.optim import Adam

DEVICES = {"cpu": "cpu", "cuda": "cuda", "metal": "mps", "tpu": "xla"}
C, HEADS, LAYERS, T = 64, 4, 2, 32
WOODS = b"The fox walks in the wood. The owl sits on the oak. The hare runs to the hill. " * 8
HARBOUR = b"A boat lies in the bay. A gull rests on the mast. A crab digs in the sand. " * 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.norm1, self.norm2 = RMSNorm(C), RMSNorm(C)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))  # [B, T, H, D]
        q, k = F.rope(q, k, cos, sin)
        x = x + self.o(F.attention(q, k, v, causal=True).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.swiglu(self.gate(h), self.up(h)))


class TinyDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, C)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm(C)
        cos, sin = F.rope_tables(C // HEADS, T)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def loss(self, ids, target):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear_cross_entropy(self.norm(x), self.embed.weight, target)  # tied head, no [B, T, V]


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", choices=DEVICES, default="cpu")
    args = parser.parse_args()
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "metal": torch.backends.mps.is_available(),
        "tpu": importlib.util.find_spec("torch_xla") is not None,
    }
    if args.steps < 1 or not here[args.backend]:
        why = "--steps must be 1 or more" if args.steps < 1 else f"PyTorch sees no {args.backend} device here"
        print(f"{parser.prog}: {why}", file=sys.stderr)
        sys.exit(2)
    return args.steps, torch.device(DEVICES[args.backend])


def batches(text, device, seed=0):
    sampler = WindowSampler(text, context=T, batch=8, seed=seed)
    while True:
        yield [torch.tensor(rows, device=device) for rows in sampler.next()]


def train(model, text, lr, steps, device):
    """What of the model can be trained, on windows of a text."""
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=lr, gradient_clip=1.0)
    for step, (ids, target) in zip(range(1, steps + 1), batches(text, device)):
        loss = model.loss(ids, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, steps) or step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
