"""What only a GPU can show: memory that really runs out, a device's own error, pinned buffers, chunks on kernels."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from train.test_walk import compared, filled, gradients, row
from train.tiny import examples

from riftco.data import Loader, Staging, pack
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.optim import Adam
from riftco.train import Schedule, StepAbandoned, Trainer, walk

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).parents[2]
CONFIG = DecoderConfig("llama", 4096, 256, 512, 4, 4, 2, 64, 4096, Rope(64, 1e4))


def trainer(**options):
    torch.manual_seed(3)
    model = Decoder(CONFIG).cuda()
    data = [e for e in examples(400) if len(e) > 4]
    loader = Loader(data, 1500, seed=0)
    optimizer = Adam(model.parameters(), lr=1e-3, gradient_clip=1.0)
    return Trainer(model, optimizer, loader, Schedule(1e-3, 20), accumulate=2, device="cuda", **options)


def weights(made):
    return [p.detach().clone() for p in made.model.parameters()]


class Starved:
    """Within the block the process may take only `spare` bytes more than it holds now.

    What the allocator has reserved and not given out would serve as well: it is filled first, in pieces of its large
    and of its small blocks.
    """

    def __init__(self, spare):
        self.spare, self.filler = spare, []

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.limit(0)
        for piece in (8 << 20, 2 << 20, 256 << 10, 512):
            try:
                while True:
                    self.filler.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        self.limit(self.spare)

    def __exit__(self, *exc):
        torch.cuda.set_per_process_memory_fraction(1.0)
        self.filler.clear()

    @staticmethod
    def limit(more):
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / whole))


def test_memory_that_really_runs_out_drops_the_step():
    plain = trainer()
    plain.run(4)
    want, made = weights(plain), trainer()
    made.run(3)
    with Starved(4 << 20), pytest.raises(StepAbandoned, match=r"same batch comes next.*out of memory"):
        made.run(1)
    made.run(1)
    assert all(torch.equal(a, b) for a, b in zip(weights(made), want, strict=True))


def test_micro_batches_are_halved_until_they_fit():
    plain = trainer()
    plain.run(1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    want = plain.run(1).metrics[0]
    step = torch.cuda.max_memory_allocated() - before
    made = trainer(auto_micro_batch=True)
    made.run(1)
    with Starved(step * 3 // 4):
        got = made.run(1).metrics[0]
    assert made.halvings >= 1
    assert got.loss == pytest.approx(want.loss, rel=1e-4)
    assert got.gradient_norm == pytest.approx(want.gradient_norm, rel=1e-3)


BROKEN = """
import torch
from train.test_gpu import trainer
from riftco.train import TrainerPoisoned
made = trainer()
made.run(1)
real = made.model.loss

def broken(ids, *args, **options):
    torch.zeros(1, device="cuda")[ids + 10**6]  # PyTorch's kernel asserts on the device
    return real(ids, *args, **options)

made.model.loss = broken
try:
    made.run(1)
except TrainerPoisoned as poisoned:
    print("poisoned", made.step, poisoned)
try:
    made.run(1)
except TrainerPoisoned as refused:
    print("refused", refused)
"""


def test_a_device_side_assertion_poisons():
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
    )
    assert "poisoned 1" in done.stdout, done.stdout + done.stderr
    assert "refused this trainer is unusable since" in done.stdout


def test_batches_travel_through_pinned_buffers():
    staging = Staging(torch.device("cuda"))
    batches = [pack(examples(n, seed=n)) for n in (3, 9, 1, 9, 4)]
    moved = [staging(b) for b in batches]
    for a, b in zip(batches, moved, strict=True):
        assert torch.equal(a.input_ids, b.input_ids.cpu())
        assert torch.equal(a.target, b.target.cpu())
        assert torch.equal(a.cu_seqlens, b.cu_seqlens.cpu())
    assert all(t.is_pinned() for buffers in staging._buffers for t in buffers.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "q8_0"])
def test_walk_is_one_graph_on_the_kernels(kind, recompute):
    from train.test_walk import PREFIX, decoder

    model = decoder().cuda()
    ids, target = (t.cuda() for t in row(61))
    cache = filled(model, kind)
    where = {"cache": cache, "prefix": PREFIX}
    walk(model, ids, target, chunk=61, **where)
    want = gradients(model)
    walk(model, ids, target, chunk=16, recompute=recompute, **where)
    assert compared(gradients(model), want) == (1.0, 1.0)
