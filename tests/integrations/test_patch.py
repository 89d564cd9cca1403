"""A patched model of each family is the same function as transformers': losses, gradients, generation, files."""

import copy
import io

import pytest
import torch
from families import covers
from patched import KINDS, assert_same, batch, pair
from tiny_models import hf_model

import riftco
from riftco.integrations import swap
from riftco.integrations.transformers import attention as interface
from riftco.integrations.transformers import loss, masks, report

ALL = ("norm", "mlp", "rope", "attention", "loss")


@covers("patch")
def test_loss_and_gradients_are_transformers(family):
    plain, patched = pair(family)
    for kind in KINDS:
        assert_same(plain, patched, batch(kind), num_items_in_batch=torch.tensor(50))
    assert_same(plain, patched, batch("left"))  # the mean over this batch's own labels


@covers("patch")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_are_equal(family, cache):
    plain, patched = (m.eval() for m in pair(family))
    options = {"max_new_tokens": 14, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    inputs = {k: v for k, v in batch("left").items() if k != "labels"}
    want, got = (m.generate(**inputs, **options) for m in (plain, patched))
    assert torch.equal(want, got)


@covers("patch")
def test_everything_is_swapped_and_comes_back(family):
    _, patched = pair(family)
    found = report(patched)
    assert {e.part for e in found.swapped} == set(ALL) and not found.kept
    assert str(riftco.patch(patched)) == str(found)  # twice is once
    plain = hf_model(family)
    count = riftco.unpatch(patched)
    assert count == sum(e.count for e in found.swapped if e.part != "attention") + len(
        {type(m) for m in plain.modules() if type(m).__name__.endswith("RotaryEmbedding")}
    )
    assert [type(m) for m in patched.modules()] == [type(m) for m in plain.modules()]
    assert patched.config._attn_implementation != "riftco"
    assert all("forward" not in vars(m) and not any("riftco" in k for k in vars(m)) for m in patched.modules())
    assert {e.why_not for e in report(patched).kept} >= {"not asked for"}


def test_the_report_reads():
    _, patched = pair("llama", loss=False)
    patched.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    riftco.unpatch(patched)
    lines = str(riftco.patch(patched, loss=False)).splitlines()
    assert lines[0] == "riftco in a model of the family llama:"
    assert "  norm         5 LlamaRMSNorm             riftco's rms_norm" in lines
    assert any("1 LlamaMLP " in line and "ReLU" in line for line in lines)
    assert any("LlamaForCausalLM" in line and "not asked for" in line for line in lines)


def test_another_model_is_refused_by_name():
    with pytest.raises(ValueError, match="nothing in a Linear is of the families llama, mistral"):
        riftco.patch(torch.nn.Linear(2, 2))


def test_other_models_stay_as_they_are():
    plain, patched = pair("llama")
    assert type(patched.model.norm) is not type(plain.model.norm)
    assert "riftco" not in type(plain.model.norm).forward.__code__.co_filename
    assert plain.config._attn_implementation == "sdpa"
    assert report(plain).swapped == ()


def test_logits_on_request():
    plain, patched = pair("gemma2")
    inputs = batch("full")
    for mode in (True, False):
        patched.train(mode)
        out = patched(**inputs)
        assert out.logits is None and "logits" not in out
        assert len(patched(**inputs, return_dict=False)) == len(out)
        asked = patched(**inputs, output_logits=True)
        torch.testing.assert_close(asked.logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(asked.loss, out.loss)
    labels = inputs.pop("labels")
    torch.testing.assert_close(patched(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
    riftco.patch(patched, eval_logits=True)
    assert patched.eval()(**inputs, labels=labels).logits is not None
    assert patched.train()(**inputs, labels=labels).logits is None


def test_labels_already_shifted_other_ignored_label_and_positional_arguments():
    plain, patched = pair("qwen3")
    inputs = batch("full")
    labels = inputs["labels"]
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    assert_same(plain, patched, {**inputs, "shift_labels": shifted})
    assert_same(plain, patched, {**inputs, "labels": labels.masked_fill(labels == -100, 7), "ignore_index": 7})
    want, got = (m(inputs["input_ids"], inputs["attention_mask"], labels=labels).loss for m in (plain, patched))
    torch.testing.assert_close(got, want)


def test_a_loss_function_of_the_users_is_called():
    _, patched = pair("llama")
    patched.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + 3
    assert patched(**batch("full")).loss == 3
    assert "a loss function of its own" in str(report(patched))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_files_are_the_same_bytes(family, tmp_path):
    plain, patched = pair(family)
    for name, model in (("plain", plain), ("patched", patched)):
        model.save_pretrained(tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "plain").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "patched").iterdir()) and "config.json" in files
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes()


def test_copies_and_pickles_stay_patched():
    plain, patched = pair("phi3")
    twin = copy.deepcopy(patched)
    with torch.no_grad():
        patched.model.norm.weight.zero_()  # the copy is its own
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    for model in (twin, torch.load(file, weights_only=False)):
        assert report(model).kept == ()
        assert_same(plain, model, batch("full"))
        riftco.unpatch(model)
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_a_forward_that_others_replaced_is_left_alone():
    model = hf_model("llama")
    norm = model.model.norm
    norm.forward = norm.forward
    model.model.rotary_emb.forward = model.model.rotary_emb.forward
    found = riftco.patch(model)
    assert {(e.part, e.count) for e in found.kept} == {("norm", 1), ("rope", 2)}
    assert all("replaced by others" in e.why_not for e in found.kept)


def test_without_a_head_and_with_another():
    from transformers import AutoModelForSequenceClassification

    model = hf_model("llama")
    inputs = batch("full")
    want = model.model(inputs["input_ids"]).last_hidden_state
    found = riftco.patch(model.model)
    assert "no causal language model's head" in str(found)
    torch.testing.assert_close(model.model(inputs["input_ids"]).last_hidden_state, want, rtol=1e-4, atol=1e-4)
    model.config.pad_token_id = 0
    classifier = AutoModelForSequenceClassification.from_config(model.config)
    want = classifier(inputs["input_ids"], labels=torch.tensor([0, 1])).loss
    assert {e.part for e in riftco.patch(classifier).swapped} == {"norm", "mlp", "rope", "attention"}
    torch.testing.assert_close(classifier(inputs["input_ids"], labels=torch.tensor([0, 1])).loss, want)


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
def test_torch_compile_takes_the_whole_model(kind):
    plain, patched = pair("gemma3" if kind == "plain" else "qwen2-window")
    inputs = batch("full" if kind == "plain" else kind)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    want, got = plain(**inputs).loss, compiled(**inputs).loss
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    for (name, p), q in zip(plain.named_parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_bfloat16_is_as_near_to_float64_as_transformers():
    plain, patched = pair("gemma2")
    inputs = batch("right")
    exact = copy.deepcopy(plain).double()(**inputs).loss
    want, got = (m.bfloat16()(**inputs).loss for m in (plain, patched))
    assert abs(got - exact) <= 2 * abs(want - exact) + 2e-3 * exact


# Planted bugs: the comparison above must see them.


def test_a_dropped_mask_is_seen(monkeypatch):
    plain, patched = pair("llama")
    monkeypatch.setitem(interface.AttentionMaskInterface._global_mapping, "riftco", lambda *a, **k: None)
    for kind in ("left", "packed", "holes"):
        with pytest.raises(AssertionError, match="loss"):
            assert_same(plain, patched, batch(kind))


def test_a_mask_function_that_is_missing_is_seen(monkeypatch):
    plain, patched = pair("llama")
    monkeypatch.delitem(interface.AttentionMaskInterface._global_mapping, "riftco")
    with pytest.raises(AssertionError, match="loss"):
        assert_same(plain, patched, batch("packed"))


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_a_window_off_by_one_is_seen(family, monkeypatch):
    plain, patched = pair(family)
    right = masks.read

    def wrong(function):
        found = right(function)
        return found if found.left is None else masks.replace(found, left=found.left + 1)

    monkeypatch.setattr(masks, "read", wrong)
    with pytest.raises(AssertionError, match="loss"):
        assert_same(plain, patched, batch("full"))


def test_an_ignored_number_of_items_is_seen(monkeypatch):
    plain, patched = pair("llama")
    right = loss.linear_cross_entropy
    monkeypatch.setattr(loss, "linear_cross_entropy", lambda *a, denominator, **k: right(*a, **k))
    with pytest.raises(AssertionError, match="loss"):
        assert_same(plain, patched, batch("full"), num_items_in_batch=torch.tensor(50))


def test_a_norm_without_its_offset_is_seen():
    plain, patched = pair("gemma2")
    from riftco.integrations.transformers import layers

    swap.swap(patched.model.norm, layers.norm_forward, 0.0)
    with pytest.raises(AssertionError, match="loss"):
        assert_same(plain, patched, batch("full"))
