"""The finetune command on a tiny model: results, resume, interrupts, bad input."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from cli.conftest import METADATA, VOCABULARY
from safetensors.torch import load_file
from tiny_models import hf_model, write_gguf

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
    "--steps",
    6,
    "--batch-tokens",
    64,
    "--rank",
    4,
    "--lr",
    0.01,
    "--seed",
    1,
    "--save-every",
    2,
    "--device",
    "cpu",
)


def events(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def losses(result):
    return [(e["step"], e["loss"], e["gradient_norm"]) for e in events(result) if e["event"] == "step"]


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_is_trained_evaluated_and_used(riftco, model, chat, tmp_path, method):
    run = tmp_path / "run"
    done = riftco(
        "finetune", "--model", model, "--data", chat, "--eval", chat, "--output", run, "--method", method,
        *SMALL, "--steps", 30, "--log-json",
    )  # fmt: skip
    evaluations = [e for e in events(done) if e["event"] == "evaluation"]
    assert [e["name"] for e in evaluations] == ["before training", "after training"]
    assert evaluations[1]["loss"] < 0.7 * evaluations[0]["loss"]
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert {p.name for p in run.iterdir()} == {"run.json", "tokenizer", "checkpoints", "adapter"}
    weights = "nf4" if method == "qlora" else "fp32"
    used = ("--model", model, "--weights", weights, "--device", "cpu")
    with_it = riftco("evaluate", *used, "--adapter", run / "adapter", "--data", chat, "--log-json")
    assert events(with_it)[0]["loss"] == pytest.approx(evaluations[1]["loss"], rel=1e-5)
    without = riftco("evaluate", *used, "--data", chat, "--log-json")
    assert events(without)[0]["loss"] == pytest.approx(evaluations[0]["loss"], rel=1e-5)
    said = riftco("generate", *used, "--adapter", run / "adapter", "--prompt", "say a", "--max-new-tokens", 5).stdout
    plain = riftco("generate", *used, "--prompt", "say a", "--max-new-tokens", 5).stdout
    assert said != plain


def test_full_fine_tuning_writes_a_model(riftco, model, chat, tmp_path):
    run = tmp_path / "run"
    options = ("--model", model, "--data", chat, "--eval", chat, "--method", "full", *SMALL)
    whole = riftco("finetune", *options, "--output", tmp_path / "whole", "--log-json")
    evaluations = [e for e in events(whole) if e["event"] == "evaluation"]
    assert evaluations[1]["loss"] < evaluations[0]["loss"]
    assert any(e.get("text", "").startswith("--rank: of an adapter, which") for e in events(whole))
    riftco("finetune", *options, "--output", run, "--steps", 2, "--schedule", "constant")
    rest = riftco("finetune", "--resume", "--output", run, "--steps", 4, "--log-json")
    assert [s for s, _, _ in losses(rest)] == [3, 4]
    used = riftco("evaluate", "--model", tmp_path / "whole" / "model", "--data", chat, "--device", "cpu", "--log-json")
    assert events(used)[0]["loss"] == pytest.approx(evaluations[1]["loss"], rel=1e-4)


def test_accumulation_gives_the_same_first_loss(riftco, model, chat, tmp_path):
    def first(name, tokens, accumulate):
        done = riftco(
            "finetune", "--model", model, "--data", chat, "--output", tmp_path / name, "--epochs", 1, "--rank", 4,
            "--batch-tokens", tokens, "--accumulate", accumulate, "--device", "cpu", "--log-json",
        )  # fmt: skip
        return [e for e in events(done) if e["event"] == "step"]

    one, many = first("one", 1000, 1), first("many", 64, 100)
    assert len(one) == len(many) == 1
    assert one[0]["tokens"] == many[0]["tokens"]
    assert one[0]["loss"] == pytest.approx(many[0]["loss"], rel=1e-5)
    assert one[0]["gradient_norm"] == pytest.approx(many[0]["gradient_norm"], rel=1e-4)


def test_resume_equals_the_uninterrupted_run(riftco, model, chat, tmp_path):
    plan = ("--schedule", "constant", "--warmup", 0)  # the same rates whatever the horizon
    options = ("--model", model, "--data", chat, *SMALL, "--dropout", 0.2, *plan, "--log-json")
    whole = losses(riftco("finetune", *options, "--output", tmp_path / "whole"))
    assert len(whole) == 6
    first = losses(riftco("finetune", *options, "--output", tmp_path / "run", "--steps", 3))
    second = losses(riftco("finetune", "--resume", "--output", tmp_path / "run", "--steps", 6, "--log-json"))
    assert first + second == whole
    for file in ("whole", "run"):
        assert (tmp_path / file / "adapter" / "adapter_model.safetensors").exists()
    a, b = (load_file(tmp_path / f / "adapter" / "adapter_model.safetensors") for f in ("whole", "run"))
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_that_resumes(riftco, model, chat, tmp_path, number):
    run = tmp_path / "run"
    command = [
        sys.executable, "-c", "from riftco.cli import main; main()", "finetune", "--model", model, "--data", chat,
        "--output", run, *SMALL, "--steps", "100000", "--save-every", "100000", "--schedule", "constant", "--log-json",
    ]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    seen = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == "step" and seen[-1]["step"] == 3:
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=120)
    seen += [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 130, err
    steps = [e["step"] for e in seen if e["event"] == "step"]
    assert steps == list(range(1, steps[-1] + 1))
    assert seen[-1]["text"].startswith(f"stopped at step {steps[-1]} of 100000; go on with: riftco finetune --resume")
    rest = riftco("finetune", "--resume", "--output", run, "--steps", steps[-1] + 2, "--log-json")
    assert [s for s, _, _ in losses(rest)] == [steps[-1] + 1, steps[-1] + 2]


def test_lines_for_people(riftco, model, chat, tmp_path):
    done = riftco(
        "finetune", "--model", model, "--data", chat, "--eval-split", 0.2, "--output", tmp_path / "run", *SMALL
    )
    assert "step 6/6 loss " in done.stdout
    assert done.stdout.count("attention backward: native (cpu runs riftco.kernels.attention.cpu:backward for ") == 1
    assert "held out, after training: loss " in done.stdout
    made = tmp_path / "run" / "adapter"
    assert (
        f"written to {made}\nask it something: riftco generate --model {model} --adapter {made} --prompt" in done.stdout
    )


# --- bad input -----------------------------------------------------------------------------------------------------


def refused(riftco, output, *args, code=2):
    """The one line on standard error; nothing may have been written."""
    before = sorted(output.rglob("*")) if output.exists() else None
    result = riftco("finetune", *args, "--output", output, code=code)
    after = sorted(output.rglob("*")) if output.exists() else None
    assert before == after, "something was written"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("riftco: ")
    return lines[0]


def test_bad_files(riftco, model, chat, tmp_path):
    run = tmp_path / "run"
    missing = tmp_path / "missing"
    assert f"{missing}: no such file" in refused(riftco, run, "--model", missing, "--data", chat)
    assert f"{missing}: no such file" in refused(riftco, run, "--model", model, "--data", missing)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(pathlib.Path(chat).read_text() + "{oops\n")
    assert f"{broken}:11: not valid JSON" in refused(riftco, run, "--model", model, "--data", broken)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert f"{empty}: no examples in this file" in refused(riftco, run, "--model", model, "--data", empty)
    long = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]
    long.write_text(json.dumps({"messages": turns}) + "\n")
    text = refused(riftco, run, "--model", model, "--data", long)
    assert f"{long}:1: the example has" in text
    assert "more than the 256 allowed" in text
    assert "--truncate" in text
    text = refused(riftco, run, "--model", model, "--data", chat, "--max-length", 300)
    assert "--max-length 300 is longer than this model's context of 256" in text


def test_bad_models(riftco, chat, tmp_path):
    run = tmp_path / "run"
    made = hf_model("llama-tied", vocab_size=VOCABULARY)
    other = tmp_path / "other.gguf"
    write_gguf(other, made, arch="starling", **METADATA)
    assert "architecture 'starling' is not supported" in refused(riftco, run, "--model", other, "--data", chat)
    kind, wide = tmp_path / "kind.gguf", {"hidden_size": 256, "intermediate_size": 256}
    write_gguf(kind, hf_model("llama-tied", vocab_size=VOCABULARY, **wide), matrix_type="TQ2_0", **METADATA)
    assert "TQ2_0" in refused(riftco, run, "--model", kind, "--data", chat)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--rank", 0), "--rank must be a whole number of 1 or more; got 0"),
        (("--rank", 257), "rank must be a whole number between 1 and 256; got 257"),
        (("--seed", 2**63), "--seed must fit in 64 bits"),
        (("--steps", 0), "--steps must be a whole number of 1 or more"),
        (("--lr", 0), "--lr must be above 0"),
        (("--duty-cycle", 0), "--duty-cycle must be in (0, 1]"),
        (("--stream", "--steps", 3, "--eval-split", 0.5), "exclude each other; hold a file out with --eval"),
        (("--method", "magic"), "--method must be one of qlora, lora, full; got 'magic'"),
        (("--device", "cuda:63"), "sees no such device"),
        (("--eval-every", 2), "--eval-every needs held-out data: give --eval or --eval-split"),
        (("--eval-split", 0.01), "leaves none to evaluate on"),
        (("--batch-tokens", 8), "does not fit --batch-tokens 8"),
        (("--target-modules", "nose"), "no linear layer matches"),
        (("--activation-checkpointing", "some"), "activation_checkpointing must be one of"),
        (("--attention", "dense"), "--attention must be one of flash, materialized; got 'dense'"),
    ],
)
def test_bad_settings(riftco, model, chat, tmp_path, flags, text):
    assert text in refused(riftco, tmp_path / "run", "--model", model, "--data", chat, *flags)


def test_a_folder_that_is_in_use(riftco, model, chat, tmp_path):
    run, options = tmp_path / "run", ("--model", model, "--data", chat, *SMALL)
    assert "holds no run to resume" in refused(riftco, run, "--resume")
    riftco("finetune", *options, "--output", run)
    assert "already holds a run; go on with --resume" in refused(riftco, run, *options)
    assert "this run is finished (6 of 6 steps)" in refused(riftco, run, "--resume")
    assert "--lr 0.5 differs from the run's 0.01" in refused(riftco, run, "--resume", "--lr", 0.5)
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("")
    assert "is not empty; name a new folder" in refused(riftco, full, *options)


def test_a_signal_in_the_last_evaluation_leaves_nothing_to_resume(riftco, model, chat, tmp_path, monkeypatch):
    from riftco.train.run import Run

    real = Run._write_result

    def write(self, output):
        weights = real(self, output)
        signal.raise_signal(signal.SIGINT)
        return weights

    monkeypatch.setattr(Run, "_write_result", write)
    run = tmp_path / "run"
    done = riftco("finetune", "--model", model, "--data", chat, "--eval", chat, "--output", run, *SMALL, code=130)
    assert f"all 6 steps are done, written to {run / 'adapter'}; stopped before their evaluation" in done.stdout
    assert "this run is finished" in refused(riftco, run, "--resume")


def test_a_full_disk_is_no_bad_input(riftco, model, chat, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    monkeypatch.setattr("riftco.train.run.save_checkpoint", full)
    run = tmp_path / "run"
    done = riftco("finetune", "--model", model, "--data", chat, "--output", run, *SMALL, code=1)
    assert done.stderr.strip() == "riftco: there: No space left on device"


class Killed(BaseException):
    """Stands in for kill -9: nothing catches it."""


def killed(*args, **kwargs):
    raise Killed


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_earlier_result_is_not_taken_for_the_last_steps(riftco, model, chat, tmp_path, monkeypatch, method):
    run = tmp_path / "run"
    riftco("finetune", "--model", model, "--data", chat, "--output", run, "--method", method, *SMALL, "--steps", 2)
    file = run / f"{'adapter/adapter_model' if method == 'lora' else 'model/model'}.safetensors"
    early = load_file(file)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("riftco.train.run.Run._write_result", killed)
        riftco("finetune", "--resume", "--output", run, "--steps", 4)
    assert (run / "checkpoints" / "step-00000004").exists()
    riftco("finetune", "--resume", "--output", run)
    late = load_file(file)
    assert any(not torch.equal(late[k], early[k]) for k in late)
    assert "this run is finished (4 of 4 steps)" in refused(riftco, run, "--resume")


def test_a_run_that_was_killed_before_its_first_step_goes_on(riftco, model, chat, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("riftco.models.Tokenizer.save", killed)
        riftco("finetune", "--model", model, "--data", chat, "--output", run, *SMALL)
    rest = riftco("finetune", "--resume", "--output", run, "--log-json")
    assert [s for s, _, _ in losses(rest)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("change", [{"rank": "4"}, {"model": None}])
def test_settings_of_a_run_that_cannot_be_meant(riftco, model, chat, tmp_path, change):
    run = tmp_path / "run"
    riftco("finetune", "--model", model, "--data", chat, "--output", run, *SMALL)
    record = json.loads((run / "run.json").read_text())
    record["config"] = {k: v for k, v in {**record["config"], **change}.items() if v is not None}
    (run / "run.json").write_text(json.dumps(record))
    assert "the run's settings cannot be read" in refused(riftco, run, "--resume")


def test_a_resume_on_other_data_or_another_base_is_refused(riftco, model, chat, tmp_path):
    run = tmp_path / "run"
    riftco("finetune", "--model", model, "--data", chat, "--output", run, *SMALL)
    other = tmp_path / "other.jsonl"
    other.write_text(pathlib.Path(chat).read_text().replace("say a", "say A"))
    text = refused(riftco, run, "--resume", "--data", other, "--steps", 8)
    assert "is not what the run was trained on" in text
    twin = tmp_path / "twin.gguf"
    write_gguf(twin, hf_model("llama-tied", seed=5, vocab_size=VOCABULARY, max_position_embeddings=256), **METADATA)
    assert "was trained on another base model" in refused(riftco, run, "--resume", "--model", twin, "--steps", 8)


def test_skip_bad_counts(riftco, model, chat, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(pathlib.Path(chat).read_text() + "{oops\n")
    done = riftco("finetune", "--model", model, "--data", broken, "--output", tmp_path / "run", *SMALL, "--skip-bad")
    assert "skipped 1 bad lines; the first: " in done.stdout


def test_a_streamed_file_resumes_like_one_in_memory(riftco, model, chat, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(pathlib.Path(chat).read_text() + "{oops\n")
    plan = ("--schedule", "constant", "--warmup", 0, "--dropout", 0.2, "--log-json")
    options = ("--model", model, "--data", broken, "--stream", "--skip-bad", *SMALL, *plan)
    done = riftco("finetune", *options, "--output", tmp_path / "whole")
    assert "skipped 1 bad lines; the first: " in done.stdout
    first = losses(riftco("finetune", *options, "--output", tmp_path / "run", "--steps", 3))
    rest = losses(riftco("finetune", "--resume", "--output", tmp_path / "run", "--steps", 6, "--log-json"))
    assert first + rest == losses(done)
    text = refused(riftco, tmp_path / "x", "--model", model, "--data", chat, "--stream")
    assert "--stream needs --steps" in text
    text = refused(riftco, tmp_path / "x", "--model", model, "--data", tmp_path / "no", "--stream", "--steps", 1)
    assert "no such file" in text


@pytest.mark.parametrize("replay", ["disabled", "block"])
def test_examples_longer_than_a_chunk_train_the_same(riftco, model, chat, tmp_path, replay):
    options = ("--model", model, "--data", chat, *SMALL, "--method", "lora", "--log-json")
    whole = losses(riftco("finetune", *options, "--output", tmp_path / "whole"))
    chunk = ("--chunk", 16, "--activation-checkpointing", replay)
    chunked = losses(riftco("finetune", *options, *chunk, "--output", tmp_path / "chunked"))
    for a, b in zip(whole, chunked, strict=True):
        assert b == pytest.approx(a, rel=1e-3)


def test_a_bad_line_far_in_a_stream_is_named_and_passed_over(riftco, model, chat, tmp_path):
    lines = pathlib.Path(chat).read_text().splitlines()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([*lines, "{oops", *lines]) + "\n")
    options = ("--model", model, "--data", broken, "--stream", *SMALL, "--steps", 12, "--log-json")
    done = riftco("finetune", *options, "--output", tmp_path / "run")
    assert [s for s, _, _ in losses(done)] == list(range(1, 13))
    assert f"the batch after it comes next: DataError: {broken}:11: not valid JSON" in done.stdout
    broken.write_text("\n".join([*lines, *["{oops"] * 20, *lines]) + "\n")
    failed = riftco("finetune", *options, "--output", tmp_path / "many", code=1)
    assert f"{broken}:20: not valid JSON" in failed.stderr


def test_token_files_train_and_resume(riftco, model, tmp_path):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (10, 24))
    rows, corpus = tmp_path / "rows.npz", tmp_path / "corpus.npy"
    np.savez(rows, ids=ids, labels=np.where(ids % 3 == 0, ids, -1), weights=np.full(ids.shape, 0.5, np.float32))
    np.save(corpus, ids.reshape(-1).astype(np.uint16))
    plan = ("--schedule", "constant", "--warmup", 0, "--log-json")
    for data in (rows, corpus):
        options = ("--model", model, "--data", data, *SMALL, "--max-length", 30, *plan)
        whole = losses(riftco("finetune", *options, "--output", tmp_path / f"{data.stem}-whole"))
        first = losses(riftco("finetune", *options, "--output", tmp_path / data.stem, "--steps", 3))
        rest = riftco("finetune", "--resume", "--output", tmp_path / data.stem, "--steps", 6, "--log-json")
        assert first + losses(rest) == whole
    few = ("--model", model, "--batch-tokens", 48, "--device", "cpu", "--log-json")
    epoch = losses(riftco("finetune", *few, "--data", rows, "--output", tmp_path / "epoch", "--epochs", 2))
    assert len(epoch) == 10
    for options, why in (
        (("--data", corpus), "drawn in windows without end; give --steps"),
        (("--data", rows, "--eval-split", 0.5), "hold one out with --eval"),
        (("--data", rows, "--max-length", 20), "rows of 24 tokens are longer than the 20 allowed"),
        (("--data", rows, "--batch-tokens", 8), "a row of 24 tokens does not fit a micro-batch of 8"),
    ):
        assert why in refused(riftco, tmp_path / "x", *few, *options)
    soft = tmp_path / "soft.npz"
    np.savez(soft, ids=ids, topk_ids=ids[..., None], topk_weights=np.ones((*ids.shape, 1), np.float32))
    assert "leave --chunk out" in refused(riftco, tmp_path / "x", *few, "--data", soft, "--chunk", 8)
    np.save(corpus, np.array([VOCABULARY, 1, 2]))
    assert f"ids holds {VOCABULARY}" in refused(riftco, tmp_path / "x", *few, "--data", corpus, "--steps", 1)


def test_memory_that_runs_out_halves_the_micro_batch(riftco, model, chat, tmp_path, monkeypatch):
    from riftco.models import Decoder

    real = Decoder.loss

    def loss(self, input_ids, *args, **kwargs):
        if len(input_ids) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, input_ids, *args, **kwargs)

    options = ("--model", model, "--data", chat, *SMALL, "--batch-tokens", 200, "--log-json")
    plain = losses(riftco("finetune", *options, "--output", tmp_path / "plain"))
    monkeypatch.setattr(Decoder, "loss", loss)
    failed = riftco("finetune", *options, "--output", tmp_path / "failed", code=1)
    assert "step 1 abandoned, the same batch comes next; lower --batch-tokens" in failed.stderr
    halved = losses(riftco("finetune", *options, "--output", tmp_path / "halved", "--auto-micro-batch"))
    for a, b in zip(plain, halved, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def test_debug_shows_the_traceback(riftco, chat, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        riftco("finetune", "--model", tmp_path / "no", "--data", chat, "--output", tmp_path / "run", "--debug", code=2)


def test_a_failed_step_keeps_the_earlier_ones(riftco, model, chat, tmp_path, monkeypatch):
    from riftco.models import Decoder

    real, calls = Decoder.loss, []

    def loss(self, *args, **kwargs):
        calls.append(1)
        return real(self, *args, **kwargs) * (float("inf") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(Decoder, "loss", loss)
    run = tmp_path / "run"
    failed = riftco("finetune", "--model", model, "--data", chat, "--output", run, *SMALL, code=1)
    (line,) = failed.stderr.strip().splitlines()
    assert "step 3 abandoned: the gradient is not finite" in line
    assert f"2 steps are saved, go on with: riftco finetune --resume --output {run}" in line
    rest = riftco("finetune", "--resume", "--output", run, "--log-json")
    assert [s for s, _, _ in losses(rest)] == [3, 4, 5, 6]
