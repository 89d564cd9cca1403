"""Learns to reverse: python examples/reversal.py --steps 400 --backend cpu|cuda|metal|tpu

A row is N random symbols, a separator, and the symbols in reverse order. Only that second half is supervised, with
cross_entropy_time_range; rows of the held-out set are never drawn for training.
"""

import torch
from tiny_decoder import arguments

import riftco.functional as F
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.optim import Adam
from riftco.train import Schedule

N, SYMBOLS, BATCH = 6, 10, 64
SEPARATOR, T = SYMBOLS, 2 * N  # positions N to 2 N - 1 predict the reversed half


def rows(count, generator, held_out):
    """[count, 2 N + 1] rows whose symbols' sum is divisible by 7 (held out), or is not."""
    symbols = torch.randint(SYMBOLS, (count * 10, N), generator=generator)
    symbols = symbols[(symbols.sum(1) % 7 == 0) == held_out][:count]
    return torch.cat([symbols, torch.full((len(symbols), 1), SEPARATOR), symbols.flip(1)], 1)


def main():
    steps, device = arguments(__doc__.partition("\n")[0])
    torch.manual_seed(0)
    config = DecoderConfig("llama", SYMBOLS + 1, 64, 128, 2, 4, 4, 16, 2 * N + 1, Rope(16, 100.0))
    model, generator = Decoder(config).to(device), torch.Generator().manual_seed(1)
    schedule = Schedule(3e-3, steps, "wsd", warmup=min(20, steps))
    optimizer = Adam(model.parameters(), gradient_clip=1.0)
    for step in range(1, steps + 1):
        batch = rows(BATCH, generator, held_out=False).to(device)
        loss = F.cross_entropy_time_range(model(batch[:, :-1]), batch[:, 1:], N, T)
        loss.backward()
        optimizer.param_groups[0]["lr"] = schedule.at(step)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, steps) or step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    test = rows(500, torch.Generator().manual_seed(2), held_out=True).to(device)
    with torch.no_grad():
        right = model(test[:, :-1])[:, N:].argmax(-1) == test[:, N + 1 :]
    print(f"held out: {right.float().mean().item():.2%} of {right.numel()} symbols")


if __name__ == "__main__":
    main()
