"""The bench of decoding on a CPU: both paths, the same replies, complete rows."""

import csv

import pytest
from tiny_models import hf_config, hf_model

from riftco import cpu
from riftco.bench import decode_cpu
from riftco.models import Decoder, DecoderConfig
from riftco.serve import Engine


@pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not())
def test_rows(tmp_path, monkeypatch):
    hf_model("llama-tied").save_pretrained(tmp_path / "model")
    args = ["--model", str(tmp_path / "model"), "--weights", "fp32", "--slots", "1", "2", "--context", "9"]
    args += ["--tokens", "8", "--cache", "float32", "--out", str(tmp_path / "rows.csv")]
    assert decode_cpu.main(args) == 0
    with open(tmp_path / "rows.csv") as f:
        rows = list(csv.DictReader(f))
    assert [(r["slots"], r["path"], r["apart"]) for r in rows] == [
        ("1", "python", ""), ("1", "compiled", "0"), ("2", "python", ""), ("2", "compiled", "0")
    ]  # fmt: skip
    for row in rows:
        assert int(row["tokens"]) == 8 * int(row["slots"]) and 0 < float(row["tokens_s"]) <= float(row["best_tokens_s"])
        assert (
            row["read_mib"] == rows[0 if row["slots"] == "1" else 2]["read_mib"]
            and row["commit"]
            and row["model"] == "model"
        )
    monkeypatch.setattr(decode_cpu, "same", lambda *_: "1 of 1 from token 3")
    with pytest.raises(decode_cpu.Wrong, match="fp32, 1 slots: replies differ: 1 of 1 from token 3"):
        decode_cpu.main(args)


def test_what_a_step_reads():
    """Every weight once, in whatever form; an embedding that is no head not at all; and the rows of the slots."""
    for family, tied in (("llama-tied", True), ("llama", False)):
        model = Decoder(DecoderConfig.from_hf(hf_config(family).to_dict()))
        numbers = sum(p.numel() for p in model.parameters())
        engine = Engine(model, slots=2, window=64, cache_dtype="float32")
        rows = engine.cache.nbytes // 4
        numbers -= 0 if tied else model.model.embed_tokens.weight.numel()
        rest = decode_cpu.read_bytes(model, engine, 16) - 4 * numbers - rows
        assert 0 <= rest < 100  # the rotation's frequencies


def test_where_replies_part():
    assert decode_cpu.same([[1, 2], [3]], [[1, 2], [3]]) == "0"
    assert decode_cpu.same([[1, 2], [3, 4], [5]], [[1, 9], [3, 9], [5]]) == "2 of 3 from token 1"
