"""riftco train-tiny: it learns with every option, in any order, and no option reaches the saved config."""

import itertools
import json

import pytest
import torch

from riftco.models import load_model
from riftco.train import tiny

ATTENTION, REPLAY = ("materialized", "flash"), ("disabled", "block")


def reports(result):
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return [r for r in rows if r["event"] == "step"], [r["loss"] for r in rows if r["event"] == "evaluation"]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_it_learns_with_each_combination(riftco, tmp_path, method, backend):
    combinations = list(itertools.product(ATTENTION, REPLAY))
    if method != "full" and backend == "cpu":
        combinations = [("materialized", "block"), ("flash", "disabled")]
    saved, firsts = set(), []
    for i, (attention, replay) in enumerate(combinations):
        options = [("--attention", attention), ("--activation-checkpointing", replay), ("--backend", backend)]
        options += [("--steps", 24), ("--method", method), ("--output", tmp_path / f"{i}"), ("--log-json",)]
        turned = options[i:] + options[:i]  # any order
        steps, (before, after) = reports(riftco("train-tiny", *itertools.chain(*turned)))
        assert [s["step"] for s in steps] == list(range(1, 25))
        assert after < 0.6 * before
        firsts.append(steps[0]["loss"])
        name = "config.json" if method == "full" else "adapter_config.json"
        saved.add((tmp_path / f"{i}" / name).read_bytes())
    assert len(saved) == 1, "a saved config's bytes depend on an option"
    assert firsts == pytest.approx([firsts[0]] * len(firsts), rel=1e-2 if backend == "cuda" else 1e-5)
    if method == "full":
        model, _ = load_model(tmp_path / "0", with_tokenizer=False)
        assert model.config == tiny.tiny_config()


def test_the_defaults_are_materialized_without_checkpointing(riftco, monkeypatch):
    seen = []
    monkeypatch.setattr(tiny, "train_tiny", lambda run, shown: seen.append(run) or exit_early())

    def exit_early():
        raise ValueError("enough")

    riftco("train-tiny", code=2)
    assert seen == [tiny.TinyRun()]
    assert (seen[0].attention, seen[0].activation_checkpointing, seen[0].backend) == ("materialized", "disabled", "cpu")


def test_its_seeds_are_two(riftco):
    def first(*options):
        return reports(riftco("train-tiny", "--steps", 1, "--log-json", *options))[0][0]["loss"]

    assert first() == first()
    assert first() != first("--seed", 1)
    assert first() != first("--model-seed", 1)


@pytest.mark.parametrize(("backend", "remedy"), [("cuda", "nvidia-smi"), ("metal", "Apple"), ("tpu", "torch_xla")])
def test_a_backend_that_is_absent_exits_with_2_and_the_remedy(riftco, tmp_path, monkeypatch, backend, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = riftco("train-tiny", "--backend", backend, "--output", tmp_path / "x", code=2).stderr
    assert line.startswith(f"riftco: --backend {backend}: ")
    assert remedy in line
    assert "or use cpu" in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--steps", 0), "--steps must be a whole number of 1 or more"),
        (("--backend", "abacus"), "--backend must be one of cpu, cuda, metal, tpu; got 'abacus'"),
        (("--attention", "dense"), "--attention must be one of"),
        (("--activation-checkpointing", "some"), "--activation-checkpointing must be one of disabled, block"),
        (("--method", "magic"), "--method must be one of qlora, lora, full"),
        (("--output", "."), "--output . is already there"),
    ],
)
def test_bad_options(riftco, flags, why):
    assert why in riftco("train-tiny", *flags, code=2).stderr


@pytest.mark.gpu
@pytest.mark.parametrize("replay", REPLAY)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_replayed_step_learns_what_an_eager_one_does(riftco, method, replay):
    losses = []
    for more in ((), ("--step-graph",)):
        options = ("--backend", "cuda", "--steps", 24, "--method", method, "--activation-checkpointing", replay)
        result = riftco("train-tiny", *options, *more, "--log-json")
        steps, (before, after) = reports(result)
        assert after < 0.6 * before
        losses.append([s["loss"] for s in steps])
    assert "step graph: 23 micro-batches replayed of 1 captures, 1 eager" in result.stdout
    assert losses[1] == losses[0]


@pytest.mark.parametrize("spelling", [("--backend", "tpu"), ("--device", "xla")])
def test_finetuning_on_a_tpu_without_torch_xla_exits_with_2_and_the_remedy(riftco, tmp_path, model, chat, spelling):
    command = ("finetune", "--model", model, "--data", chat, "--output", tmp_path / "run", *spelling)
    for arguments in (command, ("evaluate", "--model", model, "--data", chat, *spelling)):
        (line,) = riftco(*arguments, code=2).stderr.splitlines()
        assert line.startswith(f"riftco: --device {spelling[1]}: torch_xla is not installed beside torch")
        assert "install torch==2.9.1 and torch_xla==2.9.0" in line
    assert not (tmp_path / "run").exists()
