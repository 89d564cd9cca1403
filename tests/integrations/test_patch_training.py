"""riftco.patch under what trains models: checkpointing, PEFT, bitsandbytes, Trainer; and on Triton's kernels."""

import copy

import pytest
import torch
from families import covers
from patched import assert_same, batch, loss_and_grads, pair
from tiny_models import hf_model

import riftco
from riftco.integrations.transformers import report
from riftco.kernels._contract import implementation


@covers("patch")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, reentrant):
    plain, patched = pair(family)
    for model in (plain, patched):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same(plain, patched, {**batch("left"), "use_cache": False})


ADAPTERS = {
    "all linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["q_proj", "qkv_proj", "lm_head"]},
    "modules to save": {"target_modules": "all-linear", "modules_to_save": ["norm", "input_layernorm", "lm_head"]},
    "dora": {"target_modules": ["o_proj", "lm_head"], "use_dora": True},
    "rslora": {"target_modules": ["down_proj", "lm_head"], "use_rslora": True},
}


def adapted(model, kind: str, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **ADAPTERS[kind], **options))


@covers("patch")
def test_peft_wraps_a_patched_model_and_a_wrapped_one_is_patched(family):
    plain, patched = pair(family)
    wrapped = copy.deepcopy(plain)
    plain, patched, wrapped = (adapted(m, "all linear") for m in (plain, patched, wrapped))
    riftco.patch(wrapped)
    riftco.patch(patched, lora=True)
    for model in (patched, wrapped):
        assert_same(plain, model, batch("left"), num_items_in_batch=30)


@pytest.mark.parametrize("kind", list(ADAPTERS))
@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "phi3"])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tied:UserWarning")
def test_every_kind_of_adapter(family, kind):
    plain, patched = pair(family)
    plain, patched = adapted(plain, kind), adapted(patched, kind)
    found = riftco.patch(patched, lora=True)
    assert_same(plain, patched, batch("right"))
    fused = patched(**batch("right")).logits is None
    assert fused == (kind != "dora")
    assert any(e.part == "loss" for e in (found.swapped if fused else found.kept))
    why = [e.why_not for e in found.entries if e.part == "lora"]
    assert why and all(w is None for w in why) == (kind != "dora"), why
    with plain.disable_adapter(), patched.disable_adapter():
        want, got = (m(**batch("right")).loss for m in (plain, patched))
        torch.testing.assert_close(got, want)
    riftco.unpatch(patched)
    assert report(patched).swapped == ()
    assert_same(plain, patched, batch("right"))


def test_an_adapter_that_is_merged_switched_or_doubled():
    plain, patched = pair("llama")
    plain, patched = adapted(plain, "head"), adapted(patched, "head")
    riftco.patch(patched, lora=True)
    for model in (plain, patched):
        model.merge_adapter()
    torch.testing.assert_close(patched(**batch("full")).loss, plain(**batch("full")).loss)
    from peft import LoraConfig

    for model in (plain, patched):
        model.unmerge_adapter()
        torch.manual_seed(5)
        model.add_adapter("second", LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head", "v_proj"]))
        model.set_adapter("second")
    assert_same(plain, patched, batch("full"))
    for model in (plain, patched):
        model.base_model.set_adapter(["default", "second"])
    assert "2 adapters are active" in str(report(patched))
    assert_same(plain, patched, batch("full"))


def test_dropout_of_an_adapter_is_pefts_own():
    plain, patched = pair("llama")
    plain, patched = (adapted(m, "head", lora_dropout=0.5) for m in (plain, patched))
    found = riftco.patch(patched, lora=True)
    assert {e.why_not for e in found.kept} == {"the adapter has dropout"}
    losses = []
    for model in (plain, patched):
        torch.manual_seed(0)
        losses.append(model(**batch("full")).loss)
    torch.testing.assert_close(*losses)
    assert all(e.why_not is None for e in report(patched.eval()).entries)


def quantised(family: str, **config):
    """The model with its linear layers in bitsandbytes' 4-bit."""
    from bitsandbytes.nn import Linear4bit

    # bitsandbytes on a CPU decodes blocks that span two rows wrongly: rows of whole blocks
    model = hf_model(family, intermediate_size=128)
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                sizes = child.in_features, child.out_features, child.bias is not None
                made = Linear4bit(*sizes, torch.float32, **config)
                made.load_state_dict(child.state_dict())
                setattr(parent, name, made.to("cpu"))
    return model.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # PEFT's own call
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_rows_that_peft_puts_before_the_prompt(kind):
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    losses = []
    for model in pair("llama"):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, config).train()
        losses.append(wrapped(**batch("left")).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])


def test_the_text_part_of_a_model_that_sees_images():
    """Gemma 3 with its tower: image tokens see each other to both sides, so that masks become matrices."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    tokens = {"image_token_index": 150, "boi_token_index": 151, "eoi_token_index": 152, "mm_tokens_per_image": 4}
    plain = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens)).train()
    patched = copy.deepcopy(plain)
    found = riftco.patch(patched)
    assert {e.part for e in found.swapped} == {"norm", "mlp", "rope", "attention"}
    assert patched.config.vision_config._attn_implementation == plain.config.vision_config._attn_implementation
    ids = torch.randint(3, 140, (1, 16))
    ids[0, 4:8] = 150
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "labels": ids.clone()}
    assert_same(plain, patched, inputs, token_type_ids=(ids == 150).long(), mm_token_type_ids=(ids == 150).long())


@pytest.mark.parametrize("nf4", [False, True])
def test_bitsandbytes_layers_stay_or_become_riftcos(nf4):
    from bitsandbytes.nn import Linear4bit

    plain = adapted(quantised("llama", quant_type="nf4"), "all linear").train()
    patched = copy.deepcopy(plain)
    state = {k: v.clone() for k, v in patched.state_dict().items()}
    found = riftco.patch(patched, lora=nf4, nf4=nf4)
    lines = {e.part: e for e in found.entries}
    assert lines["nf4"].count == 14 and (lines["nf4"].why_not is None) == nf4
    kinds = {type(m).__name__ for n, m in patched.named_modules() if n.endswith("base_layer")}
    assert kinds == ({"NF4Linear"} if nf4 else {"Linear4bit"})
    assert_same(plain, patched, batch("full"))
    assert {k: v.shape for k, v in patched.state_dict().items()} == {k: v.shape for k, v in state.items()}
    riftco.unpatch(patched)
    assert sum(type(m) is Linear4bit for m in patched.modules()) == 14
    assert_same(plain, patched, batch("full"))


def test_other_four_bit_types_stay():
    found = riftco.patch(quantised("llama", quant_type="fp4"), nf4=True)
    assert "nf4" not in {e.part for e in found.entries}


def history(model, folder, **options) -> list[float]:
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(2)
    rows = []
    for _ in range(12):
        ids = torch.randint(3, 160, (24,), generator=generator)
        labels = ids.masked_fill(torch.rand(24, generator=generator) < 0.3, -100)
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=4, learning_rate=1e-3,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:3], compute_metrics=metrics)
    trainer.train()
    found = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    return [*losses, found["eval_loss"], found["eval_mean"]]


def metrics(prediction) -> dict[str, float]:
    return {"mean": float(abs(prediction.predictions).mean())}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_with_gradient_accumulation_and_metrics(tmp_path, checkpointing):
    plain, patched = pair("smollm2", eval_logits=True)
    want, got = (history(m, tmp_path, activation_checkpointing=checkpointing) for m in (plain, patched))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-4)
    assert want[0] - want[2] > 0.01  # it learns


def test_accumulated_micro_batches_are_one_batch():
    """num_items_in_batch makes four micro-batches of unequal labels the same as the whole."""
    _, patched = pair("llama")
    inputs = batch("right")
    items = (inputs["labels"][:, 1:] != -100).sum()
    _, whole = loss_and_grads(patched, inputs, num_items_in_batch=items)
    whole = {n: g.clone() for n, g in whole.items()}
    patched.zero_grad()
    for row in range(2):
        part = {k: v[row : row + 1] for k, v in inputs.items()}
        patched(**part, num_items_in_batch=items).loss.backward()
    for name, p in patched.named_parameters():
        torch.testing.assert_close(p.grad, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here and runs the same kernels")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_tritons_kernels(family):
    plain, patched = pair(family)
    inputs = {k: v[:, :10] for k, v in batch("left").items()}
    with implementation("triton"):
        assert_same(plain, patched, inputs)
