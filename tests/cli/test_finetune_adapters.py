"""The adapter options of riftco finetune: each trains, is saved as PEFT reads it, resumes, and is used."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from riftco.adapters import read_spec

RUN = ("--batch-tokens", 64, "--rank", 3, "--lr", 0.02, "--seed", 1, "--device", "cpu", "--method", "lora")
EMBEDDING = "base_model.model.model.embed_tokens"
# flags -> what the file must hold, and what of the specification they set
CASES = {
    "dora, rslora, patterns": (
        ("--dora", "--rslora", "--rank-pattern", "q_proj=2,down_proj=5", "--alpha-pattern", "v_proj=8"),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        dict(use_dora=True, use_rslora=True, rank_pattern={"q_proj": 2, "down_proj": 5}, alpha_pattern={"v_proj": 8.0}),
    ),
    "embedding and head, tied": (
        ("--target-modules", "embed_tokens,lm_head,q_proj", "--alpha", 3),
        f"{EMBEDDING}.lora_embedding_A",
        dict(target_modules=("embed_tokens", "lm_head", "q_proj"), ensure_weight_tying=True),
    ),
    "expression, without": (
        ("--target-modules", r".*\.(q|v)_proj", "--exclude-modules", "layers.0.self_attn.v_proj"),
        "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight",
        dict(target_modules=r".*\.(q|v)_proj", exclude_modules=("layers.0.self_attn.v_proj",)),
    ),
    "saved whole, tied": (
        ("--modules-to-save", "embed_tokens,model.norm"),
        f"{EMBEDDING}.weight",
        dict(modules_to_save=("embed_tokens", "model.norm"), ensure_weight_tying=True),
    ),
    "rows": (
        ("--train-tokens", "1,2,40-44"),
        f"{EMBEDDING}.token_adapter.trainable_tokens_delta",
        dict(trainable_token_indices=(1, 2, 40, 41, 42, 43, 44)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_resumes_and_is_used(riftco, model, chat, tmp_path, name):
    flags, key, fields = CASES[name]
    run, halves = tmp_path / "run", tmp_path / "halves"
    start = ("finetune", "--model", model, "--data", chat, "--eval", chat, *RUN, *flags, "--save-every", 6)
    done = riftco(*start, "--output", run, "--steps", 12, "--schedule", "constant", "--log-json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    before, after = (e["loss"] for e in events if e["event"] == "evaluation")
    assert after < 0.8 * before
    spec = read_spec(run / "adapter")
    assert {k: getattr(spec, k) for k in fields} == fields
    assert key in load_file(run / "adapter" / "adapter_model.safetensors")

    riftco(*start, "--output", halves, "--steps", 6, "--schedule", "constant")
    riftco("finetune", "--resume", "--output", halves, "--steps", 12)
    a, b = (load_file(r / "adapter" / "adapter_model.safetensors") for r in (run, halves))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

    used = riftco("evaluate", "--model", model, "--adapter", run / "adapter", "--data", chat, "--log-json")
    assert json.loads(used.stdout)["loss"] == pytest.approx(after, rel=1e-5)


def test_peft_uses_what_was_trained(riftco, model, chat, tmp_path):
    """Embedding and head of a tied model, trained on a GGUF file, over the same model in transformers."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from riftco.adapters import load_adapter
    from riftco.models import load_model, save_hf

    flags, _, _ = CASES["embedding and head, tied"]
    riftco("finetune", "--model", model, "--data", chat, *RUN, *flags, "--steps", 4, "--output", tmp_path / "run")
    base, _ = load_model(model, with_tokenizer=False)
    save_hf(base, tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "run" / "adapter").eval()
    ids = torch.arange(3, 23)[None]
    plain = base(ids)
    load_adapter(base, tmp_path / "run" / "adapter")
    want = base.eval()(ids)
    assert (want - plain).abs().max() > 0.01
    assert (theirs(ids).logits - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--rank-pattern", "q_proj"), "--rank-pattern must be NAME=NUMBER joined by commas; got 'q_proj'"),
        (("--rank-pattern", "q_proj=0"), "rank_pattern['q_proj'] must be a whole number between 1 and 256; got 0"),
        (("--alpha-pattern", "q_proj=x"), "--alpha-pattern must be NAME=NUMBER"),
        (("--train-tokens", "7-5"), "--train-tokens must be token ids or ranges joined by commas; got '7-5'"),
        (("--train-tokens", "9999"), "trainable_token_indices of model.embed_tokens must be distinct and below 259"),
        (("--modules-to-save", "nose"), "modules_to_save names 'nose', which the model does not have"),
        (("--bias", "some"), "bias must be one of none, all, lora_only; got 'some'"),
        (("--target-modules", "nose"), "no linear layer matches target_modules=('nose',)"),
        (("--target-modules", "(q"), "'(q' is no regular expression"),
        (("--target-modules", "lm_head", "--dropout", 0.1), "--target-modules: the head's adapter has dropout"),
        (("--method", "qlora", "--modules-to-save", "up_proj"), "whose weights are quantised and cannot be trained"),
    ],
)
def test_refusals_change_nothing(riftco, model, chat, tmp_path, flags, says):
    output = tmp_path / "run"
    done = riftco("finetune", "--model", model, "--data", chat, *RUN, "--output", output, *flags, code=2)
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not output.exists()
