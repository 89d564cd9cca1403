"""GGUFLinear: what moves, casts, copies and state_dicts keep."""

import copy
import io
import pickle

import pytest
import torch
from test_gguf_linear import weight

from riftco import nn


@pytest.mark.parametrize("format", ["Q4_1", "Q6_K"])
def test_moves_casts_and_copies_keep_the_bits(format):
    w = weight(format)
    layer = nn.GGUFLinear.from_weight(w, torch.nn.Parameter(torch.randn(6)))
    want = {k: v.clone() for k, v in layer.state_dict().items() if k != "bias"}
    assert sorted(want) == ["weight", "weight.ggml_type"] and torch.equal(want["weight"], w.packed)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    loaded = nn.GGUFLinear(w.shape[1], 6, bias=True, format="Q4_0")
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    for name, other in {
        "half": copy.deepcopy(layer).half(),
        "bfloat16 by to": copy.deepcopy(layer).to("cpu", torch.bfloat16),
        "double": copy.deepcopy(layer).double(),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "weights_only": loaded,
    }.items():
        got = other.state_dict()
        assert all(torch.equal(got[k], want[k]) and got[k].dtype == want[k].dtype for k in want), name
        x = torch.randn(2, w.shape[1]).to(other.bias.dtype)
        assert other(x).dtype == x.dtype
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.device.type == "meta" and meta.to_empty(device="cpu").weight.device.type == "cpu"
    assert f"format={format}" in repr(layer)


def test_state_dict_inside_a_model():
    source = torch.nn.Sequential(torch.nn.Linear(8, 32), nn.GGUFLinear.from_weight(weight("Q4_0", 6, 1)))
    target = torch.nn.Sequential(torch.nn.Linear(8, 32), nn.GGUFLinear(32, 6))
    state, x = source.state_dict(), torch.randn(2, 8)
    target.load_state_dict(state)
    assert torch.equal(source(x), target(x))
    empty = torch.nn.Sequential(torch.nn.Linear(8, 32), nn.GGUFLinear(32, 6)).to("meta")
    empty.load_state_dict(target.state_dict(), assign=True)
    assert torch.equal(empty(x), target(x))
    state["1.weight"].fill_(0)
    assert not torch.equal(source(x), target(x))  # a copy was loaded


def test_state_dict_refusals():
    layer = nn.GGUFLinear(32, 6)
    good = layer.state_dict()
    for change, text in [
        (lambda s: s.pop("weight"), 'Missing key.*"weight"'),
        (lambda s: s.pop("weight.ggml_type"), "Missing key.*ggml_type"),
        (lambda s: s.update(extra=torch.ones(1)), 'Unexpected key.*"extra"'),
        (lambda s: s.update({"weight.foo": torch.ones(1)}), 'Unexpected key.*"weight.foo"'),
        (lambda s: s.update({"weight.ggml_type": torch.tensor(16)}), "GGML type 16 cannot be read back"),
        (lambda s: s.update(weight=good["weight"][:-1]), r"must be uint8 \(6, 34\)"),
    ]:
        state = dict(good)
        change(state)
        with pytest.raises(RuntimeError, match=text):
            layer.load_state_dict(state)
