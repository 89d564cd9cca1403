"""The dropout mask, as a function of (seed, head, row, key): the same numbers in plain torch and in every kernel.

Philox 4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The counter is
(key // 4, row, batch * H + head, 0), the seed the key; of the four words that come out, key % 4 picks one.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """A word below it drops its probability."""
    return min(round(dropout_p * 2**32), LOW)


def keep(seed: Tensor, head: Tensor, row: Tensor, key: Tensor, dropout_p: float) -> Tensor:
    """bool, of the broadcast shape of head, row and key (integers); seed int64 [1]."""
    a, b, c, d = words(seed, *torch.broadcast_tensors(head, row, key // 4))
    word = key % 4
    out = torch.where(word < 2, torch.where(word == 0, a, b), torch.where(word == 2, c, d))
    return out >= threshold(dropout_p)


def keep_range(seed: Tensor, head: Tensor, row: Tensor, start: int, stop: int, dropout_p: float) -> Tensor:
    """`keep` of the keys start to stop along a new last dimension of head and row, at a quarter of the work."""
    quad = torch.arange(start // 4, -(-stop // 4), device=seed.device)
    four = words(seed, *torch.broadcast_tensors(head.unsqueeze(-1), row.unsqueeze(-1), quad))
    return (torch.stack(four, -1) >= threshold(dropout_p)).flatten(-2)[..., start % 4 :][..., : stop - start]


def words(seed: Tensor, head: Tensor, row: Tensor, quad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of the keys 4 * quad and after, int64 below 2 ** 32."""
    a, b, c, d = quad, row, head, torch.zeros_like(quad)
    s0, s1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        high_a, low_a = _multiply(a, MULTIPLIERS[0])
        high_c, low_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ s0, low_c, high_a ^ d ^ s1, low_a
        s0, s1 = (s0 + WEYL[0]) & LOW, (s1 + WEYL[1]) & LOW
    return a, b, c, d


def _multiply(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of x * m, x below 2 ** 32, in int64 arithmetic that never overflows."""
    by_low, by_high = x * (m & 0xFFFF), x * (m >> 16)
    low = by_low + ((by_high & 0xFFFF) << 16)
    return (by_high >> 16) + (low >> 32), low & LOW
