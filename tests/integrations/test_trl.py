"""SFTTrainer on a patched model: the same losses, entropies and accuracies, with TRL's fused head on riftco's loss."""

import pytest
import torch
from patched import batch, pair

import riftco
from riftco.integrations import trl as integration
from riftco.integrations.transformers import report

pytest.importorskip("trl", reason="trl is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(160)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2", pad_token="w1")


def trained(model, folder, *, plain: bool, adapter=None, **options) -> tuple[list[dict], object]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (9, 17, 5, 30, 12, 8, 21, 14, 16, 7, 11, 25):
        ids = torch.randint(3, 160, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "completion_mask": [0] * (length // 3) + [1] * (length - length // 3)})
    arguments = SFTConfig(
        str(folder), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        learning_rate=1e-2 if adapter else 1e-3, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, seed=0, **{"max_length": 32, **options},
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), peft_config=adapter
    )
    if not plain:
        riftco.patch(trainer.model, lora=adapter is not None)
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history, trainer.model


@pytest.mark.parametrize("kind", ["padded", "packed", "padding free", "lora", "checkpointed"])
def test_the_loss_curve_is_trls(tmp_path, kind):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear") if kind == "lora" else None
    options = {"packing": kind == "packed", "padding_free": kind == "padding free"}
    if kind == "padding free":
        options["max_length"] = None
    options["activation_checkpointing"] = kind == "checkpointed"
    plain, patched = pair("smollm2")
    want, _ = trained(plain, tmp_path, plain=True, adapter=adapter, **options)
    got, model = trained(patched, tmp_path, plain=False, adapter=adapter, **options)
    for a, b in zip(want[:4], got[:4], strict=True):
        assert a.keys() == b.keys()
        keys = [k for k in a if k.removeprefix("eval_") in ("loss", "entropy", "mean_token_accuracy", "grad_norm")]
        for key in keys:
            assert float(b[key]) == pytest.approx(float(a[key]), rel=1e-3, abs=1e-4), key
    assert {e.part for e in report(model).swapped} >= {"norm", "mlp", "rope", "attention", "loss"}
    assert report(model).kept == ()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_fused_head_gives_what_trls_gives(family):
    from trl.trainer.utils import add_fused_lm_head

    plain, patched = pair(family)
    for model in (plain, patched):
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    theirs = vars(patched)["forward"]
    riftco.patch(patched)
    assert integration.swapped(patched)
    for more in ({}, {"num_items_in_batch": torch.tensor(11)}):
        inputs = {k: v for k, v in batch("right").items() if k != "use_cache"}
        want, got = (m(**inputs, **more, fused_lm_head=True) for m in (plain, patched))
        assert {k for k, v in want.items() if v is not None} == {k for k, v in got.items() if v is not None}
        assert torch.equal(want.label_mask, got.label_mask) and torch.equal(want.is_top1, got.is_top1)
        for key in ("loss", "log_probs", "entropy"):
            torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-4)
        for model, out in ((plain, want), (patched, got)):
            model.zero_grad()
            (out.log_probs * torch.arange(out.log_probs.shape[1])).sum().backward()
        for (name, p), q in zip(plain.named_parameters(), patched.named_parameters()):
            torch.testing.assert_close(q[1].grad, p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max(), msg=name)
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    inputs |= {"labels": None, "shift_labels": shifted, "fused_lm_head": True}
    want, got = (m(**inputs) for m in (plain, patched))
    torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patched(**batch("full")).loss, plain(**batch("full")).loss)
    riftco.unpatch(patched)
    assert vars(patched)["forward"] == theirs


def test_what_other_trainers_read_stays_trls():
    from trl.trainer.utils import add_fused_lm_head

    for options, why in (
        ({"temperature": 0.7}, "temperature"),
        ({"outputs": ("log_probs", "entropy")}, "reads log_probs, entropy"),  # of which GRPO takes a gradient
    ):
        _, patched = pair("llama")
        add_fused_lm_head(patched, **options)
        assert why in str(riftco.patch(patched)) and not integration.swapped(patched)
