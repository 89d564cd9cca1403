"""What `riftco serve` makes of its flags, and what it refuses before it loads anything."""

import shutil
import socket

import pytest
import torch
from cli.conftest import METADATA, VOCABULARY
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, write_gguf

from riftco.nn import GGUFLinear

pytest.importorskip("fastapi", reason="riftco[serve] is not installed")

REFUSED = {
    "lets other machines in, and there is no key": ["--host", "0.0.0.0"],
    "--host nowhere.invalid: ": ["--host", "nowhere.invalid", "--insecure"],
    f"--host {'a' * 64}: no name of a host": ["--host", "a" * 64, "--insecure"],
    "--host 192.0.2.1 is no address of this machine": ["--host", "192.0.2.1", "--insecure"],
    "TLS needs --ssl-certfile": ["--ssl-keyfile", "key.pem"],
    "absent.pem: no such file": ["--ssl-certfile", "absent.pem"],
    "--learn-duty must be above 0 and at most 1; got 0": ["--learn-duty", "0"],
    "--learn-duty must be above 0 and at most 1; got nan": ["--learn-duty", "nan"],
    "--reasoning-format must be auto or none; got 'xml'": ["--reasoning-format", "xml"],
    "--chat-template-kwargs is no JSON": ["--chat-template-kwargs", "{enable_thinking: false}"],
    "--chat-template-kwargs is no JSON: maximum recursion": ["--chat-template-kwargs", "[" * 5000],
    "chat_template_kwargs: messages is no option": ["--chat-template-kwargs", '{"messages": []}'],
    "--chat-template-kwargs must be a JSON object; got [1]": ["--chat-template-kwargs", "[1]"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals(riftco, why):
    said = riftco("serve", "--model", "absent", *REFUSED[why], code=2)
    assert why in said.stderr


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        return any_port.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_refused_before_anything_is_loaded_or_made(riftco, tmp_path, host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = ["--host", host, "--port", str(port), "--train-dir", tmp_path / "mine"]
        said = riftco("serve", "--model", "absent", *where, code=2)
    assert f"--port {port} is in use on {host}" in said.stderr
    assert not (tmp_path / "mine").exists()
    for where[1] in (host, ""):  # free again: the model is missing
        assert "absent" in riftco("serve", "--model", "absent", "--insecure", *where, code=2).stderr


@pytest.fixture
def started(riftco, model, monkeypatch):
    """Start the command up to its first request: what it made, by name."""
    from riftco.serve.http import run

    def start(*flags):
        seen = {}
        monkeypatch.setattr(run, "create_app", lambda service, **options: seen.update(options, service=service))
        monkeypatch.setattr(run.uvicorn, "run", lambda app, **options: seen.update(options))
        done = riftco(
            "serve", "--model", model, "--window", "64", "--cache", "float16", "--port", str(_free_port()), *flags
        )
        return {**seen, "said": done.stderr}

    return start


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised") / "tiny.gguf"
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
    write_gguf(path, hf_model("llama-tied", **sizes), matrix_type="Q8_0", everywhere=True, **METADATA)
    return path


PACKED = "weights packed as in the file (Q8_0), all else float32, cache float16, 4 slots of 64 tokens"


@pytest.mark.parametrize(
    ("flags", "compiler", "said"),
    [
        ((), "", PACKED),
        ((), "no C++ compiler", "weights float32; not packed: no C++ compiler, cache"),
        (("--weights", "packed"), "no C++ compiler", PACKED),
        (("--weights", "fp32"), "", "weights float32, cache"),
        (("--weights", "bf16"), "", "weights bfloat16, cache"),
        (("--weights", "nf4"), "", "weights nf4, cache"),
    ],
)
def test_a_quantised_file_stays_as_it_is_where_that_is_fast(started, quantised, monkeypatch, flags, compiler, said):
    """And the line at the start says how its weights are held."""
    monkeypatch.setattr("riftco.cpu.why_not", lambda: compiler)
    seen = started("--model", quantised, *flags)
    packed = "packed" in said.partition("not packed")[0]
    assert f"riftco: tiny on cpu, {said}" in seen["said"]
    assert isinstance(seen["service"].engine.model.lm_head, GGUFLinear) == packed


def test_a_file_that_is_not_quantised_is_held_by_the_device(started):
    assert "weights float32, cache float16" in started()["said"]


def test_every_flag_reaches_what_it_is_for(started, tmp_path):
    seen = started(
        "--train-dir", tmp_path / "mine", "--slots", "3", "--chunk", "32", "--speculate", "2", "--rank", "5",
        "--adapter-id", "me", "--lr-max", "0.02", "--journal", "3", "--learn-duty", "0.25", "--host", "127.0.0.2",
        "--chat-template-kwargs", '{"enable_thinking": false}', "--api-key", "user", "--admin-key", "root",
        "--port", "8099", "--slot-save-path", tmp_path / "slots", "--cors-origin", "https://a", "--weights", "fp16",
    )  # fmt: skip
    service = seen["service"]
    engine, scheduler = service.engine, service.scheduler
    assert service.learns and service.template == {"enable_thinking": False}
    assert (len(engine.slots), engine.window, engine.chunk, engine.learner.chunk) == (3, 64, 32, 32)
    assert (engine.cache.dtype, str(engine.model.dtype)) == ("float16", "torch.float16")
    assert engine.bank.of("me").spec.rank == 5 and engine.store.folder == tmp_path / "mine"
    assert engine.learner.lr_range == (1e-7, 0.02) and engine.learner.depth == 3
    assert (scheduler.duty.fraction, scheduler.speculate) == (0.25, 2)
    assert (seen["host"], seen["port"], seen["origins"]) == ("127.0.0.2", 8099, ["https://a"])
    assert (seen["keys"].api, seen["keys"].admin) == ("user", "root") and seen["hosts"] is None
    assert seen["train_dir"] == tmp_path / "mine" and seen["slot_files"].folder == tmp_path / "slots"


def test_without_flags_nothing_learns_and_a_tenth_is_the_duty(started, monkeypatch):
    service = started()["service"]
    assert not service.learns and service.engine.store is None and not service.engine.bank.adapters
    assert service.scheduler.duty.fraction == 0.1 and service.template == {} and service.reasoning
    assert not started("--reasoning-format", "none")["service"].reasoning
    monkeypatch.setenv("LEARN_DUTY", "0.5")
    assert started()["service"].scheduler.duty.fraction == 0.5


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, model, chat):
    """The adapter of a fine-tune over NF4."""
    from typer.testing import CliRunner

    from riftco.cli.app import app

    run = tmp_path_factory.mktemp("tuned") / "run"
    how = ["--steps", "1", "--warmup", "0", "--lr", "0.1", "--rank", "4", "--batch-tokens", "128", "--device", "cpu"]
    made = CliRunner().invoke(app, ["finetune", "--model", model, "--data", chat, "--output", str(run), *how])
    assert made.exit_code == 0, made.output
    return run / "adapter"


def weights(version):
    return {name: t.clone() for name, t in version.items()}


def test_a_fine_tuned_adapter_serves_everyone_over_the_base_that_it_was_trained_on(started, tuned):
    service = started("--adapter", tuned)["service"]
    bank = service.engine.bank
    assert service.scales == {"live": 1.0} and not service.learns
    assert bank.of("live").spec.rank == 4 and any(t.any() for n, t in bank.of("live").versions[0].items() if "_B" in n)
    assert type(bank.model.model.layers[0].self_attn.q_proj).__name__ == "NF4Linear"
    assert type(
        started("--adapter", tuned, "--weights", "fp32")["service"].engine.model.model.layers[0].mlp.up_proj
    ) is (torch.nn.Linear)


def test_a_start_with_the_same_adapter_goes_on_with_what_it_learned(started, riftco, model, tuned, tmp_path):
    flags = ["--adapter", tuned, "--train-dir", tmp_path / "mine", "--adapter-id", "pantry"]
    engine = started(*flags)["service"].engine
    first = weights(engine.bank.of("pantry").versions[0])
    with torch.no_grad():
        for parameter in engine.bank.shadow("pantry").values():
            parameter.add_(1)
    assert engine.promote("pantry") == 2
    engine.store.close()

    service = started(*flags)["service"]
    again = service.engine.bank.of("pantry")
    assert again.version == 2 and service.scales == {"pantry": 1.0}
    assert all(torch.equal(again.versions[1][n], t + 1) for n, t in first.items())
    service.engine.store.close()

    other = tmp_path / "other"
    shutil.copytree(tuned, other)
    state = load_file(other / "adapter_model.safetensors")
    save_file({n: t + 1 for n, t in state.items()}, other / "adapter_model.safetensors")
    how = [
        "--model",
        model,
        "--window",
        "64",
        "--cache",
        "float16",
        "--train-dir",
        tmp_path / "mine",
        "--adapter-id",
        "pantry",
    ]
    said = riftco("serve", *how, "--adapter", other, code=2)
    assert f"adapter 'pantry' in {tmp_path / 'mine'} did not begin as {other}" in said.stderr


def test_an_adapter_that_is_none_is_refused_before_the_model_is_loaded(riftco, tuned):
    said = riftco("serve", "--model", "absent", "--adapter", tuned.parent, code=2)
    assert f"{tuned.parent} is no adapter folder: it has no adapter_config.json; did you mean {tuned}?" in said.stderr
    said = riftco("serve", "--model", "absent", "--adapter", tuned.parent.parent, code=2)
    assert said.stderr.strip().endswith("it has no adapter_config.json")
