"""The first run: QLoRA on a small real model that comes with pip, on sample data that comes with riftco."""

from __future__ import annotations

import importlib.resources
import json
import pathlib
from dataclasses import dataclass

from ..models import generate, smollm2_path
from .config import ConfigError
from .finetune import prepare, read_run
from .run import ADAPTER, RUN, Reporter, Result, Run

OUTPUT = "riftco-quickstart"
# Chosen for two CPU cores: one or two minutes of training, well past the point where the skill is learnt.
SETTINGS = {
    "method": "qlora",
    "rank": 16,
    "alpha": 32.0,
    "lr": 1e-3,
    "schedule": "linear",
    "warmup": 4,
    "steps": 24,
    "batch_tokens": 512,
    "save_every": 8,
    "seed": 0,
}


def samples(name: str) -> pathlib.Path:
    """A file of the sample data inside the package."""
    return pathlib.Path(str(importlib.resources.files("riftco.data") / "samples" / name))


@dataclass(frozen=True)
class Quickstart:
    """A prepared first run and the question that shows what it teaches."""

    run: Run
    prompt: str
    expected: str

    @property
    def start(self) -> str:
        """What an answer that is given now shows."""
        return "before" if self.run.trainer.step == 0 else f"step {self.run.trainer.step}"

    def answer(self) -> str:
        asked = [{"role": "user", "content": self.prompt}]
        return "".join(generate(self.run.model, self.run.tokenizer, asked, max_new_tokens=32)).strip()

    def train(self) -> Result:
        return self.run.train()


def quickstart(output: str = OUTPUT, *, device: str = "auto", reporter: Reporter | None = None) -> Quickstart:
    """Prepare the first run in `output`, or go on with the one that is there.

    Raises:
        ValueError: the model is not installed, or the run in `output` is finished; the message says what to do.
    """
    model, held_out = smollm2_path(), samples("pantry_heldout.jsonl")
    folder = pathlib.Path(output)
    resume = (folder / RUN).exists()
    if resume and (folder / ADAPTER).exists() and read_run(folder)["result_step"] >= int(str(SETTINGS["steps"])):
        raise ConfigError(
            f"{output} holds a finished quickstart; ask it something with: riftco generate --model {model} "
            f"--adapter {folder / ADAPTER} --weights nf4 --prompt '...'; or start anew with --output another-folder"
        )
    given = {
        **SETTINGS,
        "model": str(model),
        "data": str(samples("pantry_train.jsonl")),
        "eval": str(held_out),
        "output": output,
        "device": device,
    }
    question, answer = json.loads(held_out.read_text().splitlines()[0])["messages"]
    run = prepare(given, resume=resume, reporter=reporter)
    return Quickstart(run, question["content"], answer["content"])
