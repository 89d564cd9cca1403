"""Two processes on gloo give what one gives of the same steps; what happens to one of them happens to both."""

import pytest
import rank_cases
import torch
from processes import ended, start
from rank_cases import FAULTS, HEADS, TRAINED, head_inputs, losses, tiny

from riftco.data import Loader, nothing
from riftco.functional import linear_cross_entropy
from riftco.nn import NF4Linear, NF4ParameterLinear
from riftco.optim import Adam
from riftco.train import Ranks, Schedule, Trainer, TrainerPoisoned
from riftco.train.config import ConfigError, FinetuneConfig, device_of_process
from riftco.train.evaluate import evaluate

# float32 sums in another order; bfloat16 and float16 round d_x once more, where the processes' parts are added
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    for status, _, errors in ended(start(2, rank_cases.__file__, folder)):
        assert status == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_one_process(two, name):
    one = TRAINED[name](Ranks())
    for ours in (results[name] for results in two):
        assert ours["losses"] == pytest.approx(one["losses"], rel=2e-6)
        assert ours["norms"] == pytest.approx(one["norms"], rel=2e-6)
        assert ours["tokens"] == one["tokens"], "counts are of all processes"
        assert ours["held out"] == pytest.approx(one["held out"], rel=2e-6)
        assert ours["weights"].keys() == one["weights"].keys()
        assert max(off(ours["weights"][n], w) for n, w in one["weights"].items()) < 2e-5
    first, second = (results[name] for results in two)
    assert first["losses"] == second["losses"] and first["norms"] == second["norms"]
    assert all(torch.equal(w, second["weights"][n]) for n, w in first["weights"].items()), "bit for bit the same"
    assert first["moments"].keys() == one["moments"].keys() and one["moments"]
    assert max(off(m, one["moments"][n]) for n, m in first["moments"].items()) < 2e-5
    assert second["moments"] == {}, "only the first process keeps what is gathered"


def test_the_steps_do_learn_something():
    """What the comparison would not see: that nothing happens in either."""
    one = TRAINED["qlora ddp"](Ranks())
    fresh = rank_cases.model_of("qlora")
    assert min(off(w, fresh.get_parameter(n).detach()) for n, w in one["weights"].items()) > 1e-2


def test_moments_go_on_in_another_form(two):
    expected = TRAINED["full fsdp"](Ranks())["losses"]
    for results in two:
        assert results["resumed"]["losses"] == pytest.approx(expected, rel=2e-6)


def test_planted_bugs_are_seen(two):
    x, w, _, target, _ = head_inputs(torch.float64, "cpu")
    assert two[0]["planted"]["head"] != pytest.approx(float(linear_cross_entropy(x, w, target)), rel=1e-3)
    assert two[0]["planted"]["losses"] != pytest.approx(TRAINED["qlora ddp"](Ranks())["losses"], rel=1e-4)


def uninterrupted() -> list[float]:
    return losses(tiny(Ranks()))


def test_out_of_memory_in_one_process_drops_the_step_in_both(two):
    for rank, found in enumerate(r["one_runs_out_of_memory"] for r in two):
        why, of_another = found["why"]
        assert "same batch comes next" in why and "none left" in why and of_another == (rank == 0)
        assert found["losses"] == pytest.approx(uninterrupted(), rel=1e-6)
    assert two[0]["one_runs_out_of_memory"]["why"][0].startswith("process 1: step 2 abandoned")


def test_one_process_may_halve_its_micro_batches(two):
    assert [r["one_halves"]["halvings"] for r in two] == [0, 1]
    for results in two:
        assert results["one_halves"]["losses"] == pytest.approx(uninterrupted(), rel=1e-6)


def test_a_bad_batch_is_passed_over_by_both(two):
    alone = rank_cases.all_have_a_bad_batch(Ranks())
    for rank, found in enumerate(r["all_have_a_bad_batch"] for r in two):
        assert "this batch is bad" in found["why"][0] and found["why"][1] == (rank == 1), "said once"
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)


def test_one_process_that_stops_stops_both(two):
    for results in two:
        assert results["one_asks_to_stop"]["first"] == (1, False)
        assert results["one_asks_to_stop"]["losses"] == pytest.approx(uninterrupted(), rel=1e-6)


def test_a_device_that_fails_poisons_both(two):
    for rank, found in enumerate(r["one_device_fails"] for r in two):
        assert "illegal memory access" in found["why"][0] and found["why"][1] == (rank == 0)
        assert "unusable" in found["again"][0]


def test_other_data_in_one_process_is_refused(two):
    for results in two:
        assert "disagree about the step and its data" in results["data_differs"]["why"][0]


def test_a_refusal_is_said_once(two):
    assert two[0]["one_refuses"]["why"] == ("process 1: no such file", True)
    assert two[1]["one_refuses"]["why"] == ("no such file", False)
    assert len(FAULTS) == 7


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("rows", ["whole", "cut"])
@pytest.mark.parametrize("case", range(len(HEADS)))
def test_a_head_in_parts_is_the_whole_head(two, dtype, rows, case):
    """Against the plain meaning of the whole head; in 16 bit against the same, sliced, whose roundings it shares."""
    x, w, b, target, weight = head_inputs(dtype, "cpu")
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    impl = "spec" if dtype.itemsize >= 4 else None
    loss, lse = linear_cross_entropy(x, w, target, b, row_weight=weight, return_lse=True, impl=impl, **HEADS[case])
    loss.backward(torch.linspace(-1, 1, loss.numel()).to(loss).view(loss.shape) if loss.dim() else None)
    for results in two:
        ours = results["head"]["results"][dtype, case, rows]
        names = ("loss", "lse", "d_x", "d_weight", "d_bias")
        errors = {n: off(a, e) for n, a, e in zip(names, ours, (loss.detach(), lse, x.grad, w.grad, b.grad))}
        assert max(errors.values()) < BUDGET[dtype], errors
        assert ours[2].shape == x.shape and ours[3].dtype == dtype


def test_a_head_in_parts_by_finite_differences(two):
    assert all(results["head"]["gradcheck"] for results in two)


def test_what_a_head_in_parts_refuses(two):
    refused = two[0]["head"]["refused"]
    assert "label_smoothing cannot be used with a DTensor weight" in refused["label_smoothing"]
    assert "topk cannot be used" in refused["topk"] and "must be Shard(0)" in refused["columns"]


def test_what_adam_refuses(two):
    assert "cannot hold DTensors" in two[0]["adam_refuses"]["codes"]
    assert "all must be, or none" in two[0]["adam_refuses"]["mixed"]


@pytest.mark.parametrize("features", [(48, 24), (2, 5)])  # the second has an odd number of bytes
def test_nf4_as_parameters_is_the_same_layer(features):
    torch.manual_seed(0)
    plain = NF4Linear.from_linear(torch.nn.Linear(*features))
    layer = NF4ParameterLinear(plain).to(torch.float16)
    assert all(p.is_floating_point() for p in layer.parameters()), "FSDP2 of torch 2.11 refuses others"
    assert torch.equal(layer.weight.codes, plain.weight.codes), "no cast has a hold"
    assert torch.equal(layer.weight.scale, plain.weight.scale) and layer.scale.dtype == torch.float32
    x = torch.randn(3, features[0], dtype=torch.float16)
    assert torch.equal(layer(x), plain.to(torch.float16)(x))
    again = NF4ParameterLinear(NF4Linear(*features, bias=True))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight.codes, plain.weight.codes) and set(layer.state_dict()) == {"codes", "scale", "bias"}


def test_a_batch_of_nothing_gives_nothing():
    model = rank_cases.model_of("full")
    batch = nothing()
    loss = model.loss(
        batch.input_ids, batch.target, None, 0, 5, positions=batch.positions, cu_seqlens=batch.cu_seqlens, max_seqlen=1
    )
    loss.backward()
    assert float(loss.detach()) == 0 and all(not p.grad.any() for p in model.parameters())
    held = Loader(rank_cases.texts(11), 64, 0).sequential()
    assert evaluate(model, [*held, batch]) == evaluate(model, held)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory: none left"), ValueError("bad batch")])
def test_a_failure_in_the_middle_of_what_all_compute_ends_the_run(error):
    class Cut(rank_cases.Faulty):
        sharded = True

    trainer = tiny(Ranks(), Cut(Ranks(), 0, 3, error))
    memory = isinstance(error, torch.OutOfMemoryError)
    with pytest.raises(TrainerPoisoned, match="step 1 failed, while all processes compute together") as caught:
        trainer.run()
    assert ("lower --batch-tokens and restore a checkpoint" in str(caught.value)) == memory
    with pytest.raises(TrainerPoisoned, match="unusable"):
        trainer.run()
    for option in ({"auto_micro_batch": True}, {"chunk": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}: not for weights that are cut"):
            tiny(Ranks(), Cut(Ranks(), 0, 0, error), **option)


def test_too_few_micro_batches_are_refused():
    ranks = Ranks()
    ranks.world = 3
    model = rank_cases.TinyModel()
    with pytest.raises(ValueError, match=r"accumulate=2 micro-batches .* some of 3 processes"):
        Trainer(model, Adam(model.parameters()), None, Schedule(1.0, 2), accumulate=2, ranks=ranks)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"accumulate": 1}, "--accumulate 1: a step of so many .* 2 processes"),
        ({"parallel": "fsdp", "weights": "packed"}, "--weights packed"),
        ({"method": "full", "optimizer_state": "paged-8bit"}, "--optimizer-state paged-8bit"),
        ({"method": "full", "chunk": 8}, "--chunk is not for"),
        ({"parallel": "fsdp", "auto_micro_batch": True}, "--auto-micro-batch is not for"),
        ({"parallel": "fsdp", "step_graph": True}, "--step-graph is not for"),
        ({"parallel": "fsdp", "offload_activations": True}, "--offload-activations is not for"),
    ],
)
def test_settings_that_processes_cannot_have(settings, named):
    config = FinetuneConfig(model="m", data="d", output="o", **{"accumulate": 2, **settings})
    config.check_processes(1)
    with pytest.raises(ConfigError, match=named):
        config.check_processes(2)


def test_the_device_of_a_process(monkeypatch):
    assert device_of_process("cpu") == torch.device("cpu")
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="a GPU each"):
        device_of_process("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes, but PyTorch sees 1 GPUs"):
        device_of_process("auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of_process("cuda") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="--parallel must be one of auto, ddp, fsdp"):
        FinetuneConfig(model="m", data="d", output="o", parallel="dp")
