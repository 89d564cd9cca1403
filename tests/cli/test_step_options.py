"""--step-graph and --offload-activations where there is no GPU: the run goes on as it was, and says so."""

import itertools
import json

import pytest
import torch

from riftco.train.config import FinetuneConfig
from riftco.train.offload import offload_for


def events(result, kind):
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return [r for r in rows if r["event"] == kind]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--step-graph", "step graph: steps stay eager: CUDA graphs need a CUDA device, this is cpu"),
        ("--offload-activations", "activations on cpu are not offloaded: only a CUDA device's memory is apart"),
    ],
)
def test_on_a_cpu_the_run_is_the_same_and_says_so(riftco, model, chat, tmp_path, option, said):
    def run(name, *more):
        return riftco(
            "finetune", "--model", model, "--data", chat, "--output", tmp_path / name, "--steps", 3, "--rank", 4,
            "--batch-tokens", 64, "--device", "cpu", "--log-json", *more,
        )  # fmt: skip

    plain, asked = run("plain"), run("asked", option)
    assert said not in plain.stdout and said in [e["text"] for e in events(asked, "note")]
    assert [e["loss"] for e in events(asked, "step")] == [e["loss"] for e in events(plain, "step")]
    assert json.loads((tmp_path / "asked" / "run.json").read_text())["config"][option[2:].replace("-", "_")] is True
    # neither decides what the losses are, so that a resume may ask for it or not
    more = riftco("finetune", "--resume", "--output", tmp_path / "plain", "--steps", 4, option, "--log-json")
    assert said in [e["text"] for e in events(more, "note")]


ALONE = ("--step-graph", "--offload-activations", "--chunk")


@pytest.mark.parametrize("pair", [*itertools.combinations(ALONE, 2)])
def test_they_exclude_each_other(riftco, model, chat, tmp_path, pair):
    flags = [f for name in pair for f in ((name, 8) if name == "--chunk" else (name,))]
    line = riftco("finetune", "--model", model, "--data", chat, "--output", tmp_path / "x", *flags, code=2).stderr
    assert "exclude each other; give one of them" in line and all(name in line for name in pair)
    assert not (tmp_path / "x").exists()


def test_a_budget_of_host_memory_is_a_size_and_needs_what_it_bounds(riftco, model, chat, tmp_path):
    def refused(*flags):
        return riftco("finetune", "--model", model, "--data", chat, "--output", tmp_path / "x", *flags, code=2).stderr

    assert "--offload-budget needs --offload-activations" in refused("--offload-budget", "1GiB")
    line = refused("--offload-activations", "--offload-budget", "plenty")
    assert "--offload-budget must be a size such as 24GiB; got 'plenty'" in line
    settings = FinetuneConfig("m", "d", "o", offload_activations=True, offload_budget="1.5MiB")
    made = offload_for(torch.nn.Linear(2, 2), torch.device("cpu"), lambda text: None, settings.offload_bytes)
    assert made.host_bytes == 3 << 19


def test_train_tiny_takes_it(riftco, tmp_path):
    saved = []
    for i, more in enumerate([(), ("--step-graph",)]):
        done = riftco("train-tiny", *more, "--steps", 3, "--output", tmp_path / f"{i}", "--log-json")
        saved.append((tmp_path / f"{i}" / "config.json").read_bytes())
    assert saved[0] == saved[1]
    assert [e["text"] for e in events(done, "note") if "step graph" in e["text"]] == [
        "step graph: steps stay eager: CUDA graphs need a CUDA device, this is cpu",
        "step graph: steps are eager: CUDA graphs need a CUDA device, this is cpu",
    ]
