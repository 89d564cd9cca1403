"""What two processes do in test_many_processes: `python rank_cases.py FOLDER [DEVICE]` in each of them runs every case
and leaves FOLDER/<rank>.pt. The same functions give what one process makes of it."""

import pathlib
import sys

import torch
from tiny import ClippedAdamW, TinyModel, examples

from riftco.adapters import LoraSpec, apply_lora
from riftco.data import Batch, DataError, Example, Geometry, Loader, nothing
from riftco.functional import linear_cross_entropy
from riftco.models import Decoder, DecoderConfig
from riftco.models.load import quantize_blocks
from riftco.optim import Adam
from riftco.train import Ranks, Schedule, StepAbandoned, Trainer, TrainerPoisoned, evaluate
from riftco.train.gather import gathered, scatter
from riftco.train.ranks import DisagreementError, ElsewhereError
from riftco.train.sharding import Sharded

V, STEPS = 97, 4
SHAPE = dict(
    model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=V, rope_theta=10000.0, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip


def model_of(method: str, checkpointing: str = "disabled", tied: bool = False) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.from_hf({**SHAPE, "tie_word_embeddings": tied})
    model = Decoder(config, activation_checkpointing=checkpointing)
    if method == "full":
        return model
    if method == "qlora":
        quantize_blocks(model)
    apply_lora(model, LoraSpec(rank=4, alpha=8), seed=0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and not p.any():  # B starts at zero, which would leave A without a gradient
                p.normal_(std=0.02)
    return model


def texts(count: int = 40) -> list[Example]:
    """Random tokens with weights, of very different lengths: processes have unequal work."""
    drawn = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        length = int(torch.randint(4, 30, (), generator=drawn))
        ids = torch.randint(0, V, (length,), generator=drawn).tolist()
        made.append(Example(tuple(ids), (0.0, 0.0, *[1.0 + 0.5 * (i % 3 == 0)] * (length - 2)), line=i + 1))
    return made


class TopK:
    """Micro-batches whose positions have two weighted labels."""

    def __init__(self):
        self.count = 0

    def next(self):
        drawn = torch.Generator().manual_seed(self.count)
        self.count += 1
        ids = torch.randint(0, V, (24, 3), generator=drawn)
        weights = torch.rand(24, 2, generator=drawn)
        return Batch(ids[:, 0], ids[:, 1], Geometry.of([10, 14]), None, 24, (), ids[:, 1:].contiguous(), weights)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def trained(ranks: Ranks, method: str, cut: bool, *, accumulate=3, state="contiguous", source=None, **how) -> dict:
    """Losses, norms and weights of a few steps; `accumulate` is no multiple of two, so that one process has less."""
    model = model_of(method, **how).to(ranks.device)
    runs = Sharded(model, ranks) if cut and not ranks.alone else model
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], gradient_clip=1.0, state=state)
    source = source or Loader(texts(), 64, 0, 2)
    schedule = Schedule(1e-2, STEPS, "constant")
    trainer = Trainer(runs, optimizer, source, schedule, accumulate=accumulate, ranks=ranks, device=ranks.device)
    metrics = trainer.run().metrics
    weights = gathered(model, True)
    held = Loader(texts(11), 64, 0).sequential()
    mine = ranks.share(held)
    mine += [nothing()] * (ranks.most_of(held) - len(mine))
    _, moments = trainer.state_dict()
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.gradient_norm for m in metrics],
        "tokens": [(m.tokens, m.physical_tokens) for m in metrics],
        "weights": {n: w for n, w in weights.items() if model.get_parameter(n).requires_grad},
        "moments": {n: m.float() for n, m in moments.items() if n.endswith("exp_avg")},
        "held out": evaluate(runs, mine, ranks.device, ranks).loss,
    }


def resumed(ranks: Ranks, folder: pathlib.Path) -> dict:
    """Two steps, all of it to a file and back into another form of moments, and two more."""

    def made(state: str) -> tuple[Decoder, Trainer]:
        model = model_of("full")
        runs = model if ranks.alone else Sharded(model, ranks)
        optimizer = Adam(list(model.parameters()), gradient_clip=1.0, state=state)
        schedule = Schedule(1e-2, STEPS, "constant")
        return model, Trainer(runs, optimizer, Loader(texts(), 64, 0, 2), schedule, accumulate=3, ranks=ranks)

    model, trainer = made("contiguous")
    before = [m.loss for m in trainer.run(2).metrics]
    state, tensors = trainer.state_dict()
    weights = gathered(model, ranks.main)
    if ranks.main:
        torch.save((tensors, weights), folder / "state.pt")
    ranks.wait()
    tensors, weights = torch.load(folder / "state.pt")
    model, trainer = made("paged")
    scatter(model, weights)
    trainer.load_state_dict(state, tensors)
    return {"losses": before + [m.loss for m in trainer.run().metrics]}


TRAINED = {
    "full ddp": lambda ranks: trained(ranks, "full", False),
    "full fsdp": lambda ranks: trained(ranks, "full", True),
    "full fsdp paged tied block": lambda r: trained(r, "full", True, state="paged", tied=True, checkpointing="block"),
    "full fsdp selective": lambda ranks: trained(ranks, "full", True, checkpointing="selective"),
    "full fsdp topk": lambda ranks: trained(ranks, "full", True, source=TopK()),
    "lora fsdp": lambda ranks: trained(ranks, "lora", True),
    "qlora ddp": lambda ranks: trained(ranks, "qlora", False, state="paged"),
    "qlora fsdp block": lambda ranks: trained(ranks, "qlora", True, state="paged", checkpointing="block"),
}


class Faulty(TinyModel):
    """Fails once, in the process `where`, at the `at`-th micro-batch of that process."""

    def __init__(self, ranks: Ranks, where: int, at: int, error: BaseException):
        super().__init__()
        self.left = at if ranks.rank == where else -1
        self.error = error

    def loss(self, *arguments, **options):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().loss(*arguments, **options)


class Broken(Loader):
    """One batch cannot be read, in every process."""

    def next(self):
        batch = super().next()
        if batch is not None and self.position == 4 and self.epoch == 0:
            raise DataError("this batch is bad")
        return batch


def tiny(ranks: Ranks, model=None, source=None, **options) -> Trainer:
    made = model or TinyModel()
    torch.manual_seed(0)
    made.load_state_dict(TinyModel().state_dict())
    optimizer = ClippedAdamW(made.parameters(), lr=0.0)
    source = source or Loader(examples(), 16, 0, None)
    return Trainer(made, optimizer, source, Schedule(1e-2, STEPS, "constant"), accumulate=4, ranks=ranks, **options)


def losses(trainer: Trainer) -> list[float]:
    return [m.loss for m in trainer.run().metrics]


def caught(kind: type, call) -> tuple[str, bool]:
    """(the error's text, whether it is another process's)."""
    try:
        call()
    except kind as error:
        return str(error), getattr(error, "of_another", False)
    raise AssertionError(f"no {kind.__name__}")


def one_runs_out_of_memory(ranks: Ranks) -> dict:
    trainer = tiny(ranks, Faulty(ranks, 1, 3, torch.OutOfMemoryError("CUDA out of memory: none left")))
    first = losses_until(trainer, 1)
    why = caught(StepAbandoned, trainer.run)
    return {"why": why, "losses": first + losses(trainer)}


def one_halves(ranks: Ranks) -> dict:
    faulty = Faulty(ranks, 1, 3, torch.OutOfMemoryError("CUDA out of memory: none left"))
    trainer = tiny(ranks, faulty, auto_micro_batch=True)
    return {"losses": losses(trainer), "halvings": trainer.halvings}


def losses_until(trainer: Trainer, steps: int) -> list[float]:
    return [m.loss for m in trainer.run(steps).metrics]


def all_have_a_bad_batch(ranks: Ranks) -> dict:
    trainer = tiny(ranks, source=Broken(examples(), 16, 0, None))
    why = caught(StepAbandoned, trainer.run)
    return {"why": why, "losses": losses(trainer)}


def one_asks_to_stop(ranks: Ranks) -> dict:
    """In the second step, behind the first of its two micro-batches; that step is computed again."""
    asked = []

    def stop(progress):
        asked.append(progress)
        first_time = len(asked) <= 3 and progress.step == 2 and progress.micro_batch == 1
        return not (first_time and ranks.rank == ranks.world - 1)

    trainer = tiny(ranks, on_progress=stop)
    report = trainer.run()
    done = [m.loss for m in report.metrics]
    return {"first": (len(done), report.epoch_complete), "losses": done + losses(trainer)}


def one_device_fails(ranks: Ranks) -> dict:
    trainer = tiny(ranks, Faulty(ranks, 1, 3, RuntimeError("CUDA error: an illegal memory access was encountered")))
    return {"why": caught(TrainerPoisoned, trainer.run), "again": caught(TrainerPoisoned, trainer.run)}


def data_differs(ranks: Ranks) -> dict:
    trainer = tiny(ranks, source=Loader(examples(), 16, ranks.rank, None))
    return {"why": caught(DisagreementError, trainer.run)}


def one_refuses(ranks: Ranks) -> dict:
    def check():
        with ranks.alike():
            if ranks.rank == 1:
                raise ValueError("no such file")

    return {"why": caught(ValueError if ranks.rank else ElsewhereError, check)}


FAULTS = (
    one_runs_out_of_memory, one_halves, all_have_a_bad_batch, one_asks_to_stop, one_device_fails, data_differs,
    one_refuses,
)  # fmt: skip

HEADS = ({}, {"z_loss": 0.1, "softcap": 3.0, "logit_scale": 0.7}, {"reduction": "sum"}, {"reduction": "none"})


def head_inputs(dtype: torch.dtype, device) -> tuple:
    """x, weight of 11 classes (two processes have 6 and 5), bias, target with rows that have none, row weights."""
    drawn = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=drawn).to(device, dtype) for shape in ((6, 5, 8), (11, 8), (11,)))
    target, weight = torch.randint(-1, 11, (6, 5), generator=drawn), torch.rand(6, 5, generator=drawn)
    return x, w, b, target.to(device), weight.to(device)


def head(ranks: Ranks) -> dict:
    """Loss, lse and gradients of a head whose classes are cut, for x that is whole and x that is cut over its rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))

    def cut(t):
        return distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)

    results = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for i, options in enumerate(HEADS):
            for rows in ("whole", "cut"):
                x, w, b, target, weight = head_inputs(dtype, ranks.device)
                if rows == "cut":
                    x, target, weight = cut(x), cut(target), cut(weight)
                x, w, b = x.requires_grad_(), cut(w).requires_grad_(), b.requires_grad_()
                loss, lse = linear_cross_entropy(
                    x, w, target, b, row_weight=weight, slice_bytes=400, return_lse=True, **options
                )
                loss.backward(torch.linspace(-1, 1, loss.numel()).to(loss).view(loss.shape) if loss.dim() else None)
                d_x = x.grad.full_tensor() if rows == "cut" else x.grad
                results[dtype, i, rows] = [loss.detach(), lse, d_x, w.grad.full_tensor(), b.grad]

    x, w, b, target, weight = head_inputs(torch.float64, ranks.device)
    x, w, target, weight = x[:2, :3], cut(w), target[:2, :3], weight[:2, :3]

    def loss_of(x, b):
        return linear_cross_entropy(x, w, target, b, row_weight=weight, z_loss=0.1, softcap=3.0, slice_bytes=100)

    checked = torch.autograd.gradcheck(loss_of, (x.requires_grad_(), b.requires_grad_()))
    refused = {
        name: caught(ValueError, lambda o=name, v=value: linear_cross_entropy(x, w, target, **{o: v}))[0]
        for name, value in {"label_smoothing": 0.1, "topk": torch.ones(2, 3, 1)}.items()
    }
    narrow = distribute_tensor(w.full_tensor(), mesh, [Shard(1)], src_data_rank=None)
    refused["columns"] = caught(ValueError, lambda: linear_cross_entropy(x, narrow, target))[0]
    return {"results": results, "gradcheck": checked, "refused": refused}


def planted(ranks: Ranks) -> dict:
    """What the comparisons must see: processes that do not add up gradients, or a head's sums of exponentials."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from riftco.kernels.linear_cross_entropy import sharded

    class Silent:
        ReduceOp = torch.distributed.ReduceOp

        @staticmethod
        def all_reduce(t, op=torch.distributed.ReduceOp.SUM, group=None):
            if op == torch.distributed.ReduceOp.MAX:
                torch.distributed.all_reduce(t, op=op, group=group)

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    x, w, _, target, _ = head_inputs(torch.float64, ranks.device)
    sharded.dist = Silent
    loss = linear_cross_entropy(x, distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None), target)
    sharded.dist = torch.distributed
    summed, Ranks.sum_gradients = Ranks.sum_gradients, lambda self, params: None
    steps = trained(ranks, "qlora", False)
    Ranks.sum_gradients = summed
    return {"head": float(loss), "losses": steps["losses"]}


def adam_refuses(ranks: Ranks) -> dict:
    model = Sharded(model_of("full"), ranks)
    params = list(model.parameters())
    return {
        "codes": caught(ValueError, lambda: Adam(params, state="paged-8bit"))[0],
        "mixed": caught(ValueError, lambda: Adam([*params, torch.nn.Parameter(torch.ones(2))]))[0],
    }


def main(folder: str, device: str = "cpu") -> None:
    ranks = Ranks.join("cpu")
    if device == "cuda":
        ranks.on(torch.device("cuda", ranks.rank))
    with ranks.until_done():
        results = {name: case(ranks) for name, case in TRAINED.items()}
        if device == "cpu":
            results |= {"planted": planted(ranks), "resumed": resumed(ranks, pathlib.Path(folder))}
            results |= {case.__name__: case(ranks) for case in FAULTS} | {"adam_refuses": adam_refuses(ranks)}
        results["head"] = head(ranks)
        torch.save(results, pathlib.Path(folder) / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
