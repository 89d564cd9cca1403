"""A fault at every stage of a step: what is dropped, what stays, and that the next step is the one that would have
followed."""

import contextlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from train.tiny import ClippedAdamW, parts

from riftco.data import Batch
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.optim import Adam
from riftco.train import DutyCycle, Schedule, StepAbandoned, Trainer, TrainerPoisoned
from riftco.train.checkpoint import open_checkpoint, save_checkpoint
from riftco.train.failures import device_failed, out_of_memory
from riftco.train.loop import MOST_STEPS


def trainer(*, accumulate=2, riftco_adam=False, steps=20, **options):
    keep = {k: options.pop(k) for k in ("auto_micro_batch", "on_progress", "limiter", "sinks") if k in options}
    model, optimizer, loader = parts(dropout=0.3, **options)
    if riftco_adam:
        optimizer = Adam(model.parameters(), lr=0.05, gradient_clip=0.1)
    torch.manual_seed(11)
    return Trainer(model, optimizer, loader, Schedule(0.05, steps, "cosine", warmup=2), accumulate=accumulate, **keep)


def everything(made):
    """Weights, moments, data position, generators: all that the next step depends on."""
    state, tensors = made.state_dict()
    weights = {f"model.{k}": v.clone() for k, v in made.model.state_dict().items()}
    return state["data"], state["step"], {**tensors, **weights}


def same(a, b):
    return a[:2] == b[:2] and a[2].keys() == b[2].keys() and all(torch.equal(a[2][k], b[2][k]) for k in a[2])


@contextlib.contextmanager
def fault(made, stage, error):
    """The next time that `stage` is reached in the second micro-batch of a step, it fails."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        calls = []

        def on_second(real, after=False):
            def wrapped(*args, **kwargs):
                calls.append(1)
                if len(calls) == 2 and not after:
                    raise error
                out = real(*args, **kwargs)
                if len(calls) == 2:
                    raise error
                return out

            return wrapped

        if stage == "data":
            patch.setattr(made.source, "next", on_second(made.source.next, after=True))
        elif stage == "allocation":
            patch.setattr(Batch, "to", on_second(Batch.to))
        elif stage == "forward":
            patch.setattr(made.model, "hidden", on_second(made.model.hidden))
        elif stage == "backward":

            def refuse(grad):
                calls.append(1)
                if len(calls) == 2:
                    raise error
                return grad

            handle = made.model.embed.weight.register_hook(refuse)  # later gradients of the step exist by then
            stack.callback(handle.remove)
        elif stage in ("clip", "commit"):
            stack.enter_context(_Refuse("riftco::adam_norm" if stage == "clip" else "riftco::adam_step", error))
        yield


class _Refuse(TorchDispatchMode):
    """An operator fails once: the norm before, the update after it has written."""

    def __init__(self, op, error):
        super().__init__()
        self.op, self.error, self.done = op, error, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        hit = func._schema.name.startswith(self.op) and not self.done
        if hit and self.op.endswith("norm"):
            self.done = True
            raise self.error
        out = func(*args, **(kwargs or {}))
        if hit:
            self.done = True
            raise self.error
        return out


def memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def device():
    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


@pytest.mark.parametrize("stage", ["data", "allocation", "forward", "backward", "clip"])
def test_out_of_memory_drops_the_step_and_the_next_one_is_the_same(stage):
    plain = trainer(riftco_adam=True)
    losses, want = [m.loss for m in plain.run(4).metrics], everything(plain)
    made = trainer(riftco_adam=True)
    made.run(3)
    before = everything(made)
    seen = []
    made.sinks = (seen.append,)
    with fault(made, stage, memory()), pytest.raises(StepAbandoned, match=r"same batch comes next.*Tried to allocate"):
        made.run(1)
    assert not seen, "no callback for work that failed"
    assert same(everything(made), before)
    assert all(p.grad is None for p in made.model.parameters())
    assert made.run(1).metrics[0].loss == losses[3]
    assert same(everything(made), want)


@pytest.mark.parametrize("stage", ["data", "allocation", "forward", "backward"])
def test_a_data_error_goes_past_its_batches_alone(stage):
    plain = trainer(riftco_adam=True)
    plain.run(3)
    plain.source.next(), plain.source.next()
    dropped = everything(plain)
    plain.run(2)
    want = everything(plain)
    made = trainer(riftco_adam=True)
    made.run(3)
    with fault(made, stage, ValueError("a shape is wrong")), pytest.raises(StepAbandoned, match="a shape is wrong"):
        made.run(1)
    assert len(made.abandoned) == 1
    assert same(everything(made), dropped)
    made.run(2)
    assert same(everything(made), want)


@pytest.mark.parametrize("stage", ["allocation", "forward", "backward", "clip", "commit"])
def test_a_device_error_poisons_at_every_stage(tmp_path, stage):
    plain = trainer(riftco_adam=True)
    plain.run(6)
    want = everything(plain)
    made = trainer(riftco_adam=True)
    made.run(3)
    state, tensors = made.state_dict()
    folder = save_checkpoint(
        tmp_path, state, tensors, lambda f: save_file(made.model.state_dict(), f / "model.safetensors")
    )
    position = made.source.state_dict()
    with fault(made, stage, device()), pytest.raises(TrainerPoisoned, match="illegal memory access"):
        made.run(1)
    assert (made.step, made.source.state_dict()) == (3, position), "the cursor is at the last completed step"
    for refused in (made.run, made.state_dict, lambda: made.load_state_dict(state, tensors)):
        with pytest.raises(TrainerPoisoned, match=r"unusable since: step 4 failed.*build it again and restore"):
            refused()
    again, saved = trainer(riftco_adam=True), open_checkpoint(folder)
    again.model.load_state_dict(load_file(folder / "model.safetensors"))
    again.load_state_dict(saved.state, saved.tensors)
    again.run(3)
    assert same(everything(again), want)


def test_memory_that_runs_out_while_parameters_are_written_poisons():
    made = trainer(riftco_adam=True)
    made.run(2)
    with fault(made, "commit", memory()), pytest.raises(TrainerPoisoned, match="partly written"):
        made.run(1)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_what_a_sink_raises_does_not_undo_the_step(error):
    plain = trainer()
    plain.run(1)
    want, made = everything(plain), trainer()

    def sink(_):
        raise error

    made.sinks = (sink,)
    with pytest.raises(type(error)):
        made.run(1)
    made.sinks = ()
    assert same(everything(made), want)


def test_a_head_that_the_sliced_loss_cannot_take_abandons_before_any_compute():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig("llama", 20, 16, 24, 1, 2, 1, 8, 64, Rope(8, 1e4)))
    head, (_, _, loader) = model.lm_head, parts()
    made = Trainer(model, Adam(model.parameters(), lr=0.01), loader, Schedule(0.01, 5))
    model.lm_head = torch.nn.Sequential(head, torch.nn.Tanh())
    reached = []
    model.model.embed_tokens.register_forward_hook(lambda *_: reached.append(1))
    with pytest.raises(StepAbandoned, match="loss: "):
        made.run(1)
    assert not reached
    model.lm_head = head
    assert made.run(1).metrics[0].step == 1


WORDS = {
    "CUDA out of memory. Tried to allocate 2.00 GiB": "memory",
    "CUDA error: out of memory": "memory",
    "Triton Error [CUDA]: out of memory": "memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "memory",
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory": "memory",
    "MPS backend out of memory (MPS allocated: 1 GB)": "memory",
    "CUDA error: an illegal memory access was encountered": "device",
    "CUDA error: unspecified launch failure": "device",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`": "device",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED": "device",
    "Triton Error [CUDA]: misaligned address": "device",
    "The size of tensor a (3) must match the size of tensor b (4)": "data",
}


@pytest.mark.parametrize("words", WORDS)
def test_errors_are_told_apart_by_what_libraries_say(words):
    error = RuntimeError(words)
    told = "memory" if out_of_memory(error) else "device" if device_failed(error) else "data"
    assert told == WORDS[words]


# --- smaller micro-batches --------------------------------------------------------------------------------------------


def limited(made, tokens):
    """The device has room for `tokens` rows at once."""
    real = made.model.hidden

    def hidden(input_ids, **where):
        if len(input_ids) > tokens:
            raise memory()
        return real(input_ids, **where)

    made.model.hidden = hidden


def test_micro_batches_are_halved_until_they_fit_and_the_step_is_the_same():
    plain, made = trainer(auto_micro_batch=True, tokens=40), trainer(auto_micro_batch=True, tokens=40)
    for t in (plain, made):
        t.model.dropout.p = 0.0
    limited(made, 12)
    want, got = plain.run(4), made.run(4)
    assert made.halvings >= 2
    assert not made.abandoned
    for a, b in zip(want.metrics, got.metrics, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.gradient_norm == pytest.approx(a.gradient_norm, rel=1e-4)
        assert (a.tokens, a.physical_tokens) == (b.tokens, b.physical_tokens)
    state, tensors = made.state_dict()
    again = trainer(auto_micro_batch=True, tokens=40)
    again.load_state_dict(state, tensors)
    assert again.halvings == made.halvings


def test_a_single_document_that_does_not_fit_is_abandoned_by_name():
    made = trainer(auto_micro_batch=True)
    limited(made, 1)
    with pytest.raises(StepAbandoned, match=r"--max-length: it is one document.*Tried to allocate"):
        made.run(1)
    with pytest.raises(StepAbandoned, match="give --auto-micro-batch"):
        limited_once = trainer()
        limited(limited_once, 1)
        limited_once.run(1)


def test_retries_leave_dropout_where_it_was():
    """Halved from the start or after a failure: the same bits."""
    failed = trainer(auto_micro_batch=True, tokens=40)
    limited(failed, 20)
    failed.run(1)
    want = everything(failed)
    assert failed.halvings
    plain = trainer(auto_micro_batch=True, tokens=40)
    plain.halvings = failed.halvings
    plain.run(1)
    assert same(everything(plain), want)


# --- the duty cycle ---------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now, self.slept = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_tenth_of_the_time_waits_nine_times_the_work():
    clock = Clock()
    duty = DutyCycle(0.1, sleep=clock.sleep, clock=clock)
    duty.worked(0.2)
    duty.wait()
    assert sum(clock.slept) == pytest.approx(1.8)
    duty.worked(0.1)
    clock.now += 5  # others took longer than the debt
    duty.wait()
    assert sum(clock.slept) == pytest.approx(1.8)
    duty.worked(1.0)
    assert duty.debt == pytest.approx(9.0)
    duty.drop()
    duty.wait()
    assert sum(clock.slept) == pytest.approx(1.8)
    idle = DutyCycle(0.1, busy=lambda: False, sleep=clock.sleep, clock=clock)
    idle.worked(1.0)
    idle.wait()
    assert sum(clock.slept) == pytest.approx(1.8)
    with pytest.raises(ValueError, match="fraction must be in"):
        DutyCycle(0)


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_cancellation_drops_the_debt(stop_at):
    clock = Clock()
    duty = DutyCycle(0.001, sleep=clock.sleep, clock=clock)
    made = trainer(limiter=duty, on_progress=lambda p: p.micro_batch != stop_at)
    made.run()
    assert made.step == stop_at - 1
    assert duty.debt == 0


def test_a_stop_ends_a_wait():
    clock = Clock()
    duty = DutyCycle(0.01, sleep=clock.sleep, clock=clock, stopped=lambda: clock.now > 0.2)
    duty.worked(1.0)
    duty.wait()
    assert sum(clock.slept) < 0.5


def test_a_horizon_beyond_the_optimizers_counter_is_refused():
    model, optimizer, loader = parts()
    with pytest.raises(OverflowError, match="does not fit the optimizer's counter"):
        Trainer(model, optimizer, loader, Schedule(0.1, MOST_STEPS + 1))
    assert isinstance(optimizer, ClippedAdamW)
