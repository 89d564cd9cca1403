"""Copies on the host: the bytes of what was copied, in few pieces of memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from riftco.train import state
from riftco.train.state import in_slabs, on_host


def tensors():
    made = {f"{i}": torch.randn(3 + i, 5) for i in range(9)}
    made |= {"step": torch.tensor(7.0), "none": torch.empty(0, 4), "codes": torch.arange(5, dtype=torch.uint8)}
    made |= {"half": torch.randn(33).to(torch.bfloat16), "strided": torch.randn(6, 4).t(), "count": torch.arange(3)}
    return made


@pytest.mark.parametrize("slab", [64, 256, 1 << 20])
def test_slabs(monkeypatch, tmp_path, slab):
    monkeypatch.setattr(state, "SLAB", slab)
    given = tensors()
    made = in_slabs(given, pinned=False)
    assert list(made) == list(given)
    for name, t in given.items():
        assert torch.equal(made[name], t) and made[name].dtype == t.dtype and made[name].is_contiguous()
        assert made[name].data_ptr() % 64 == 0 or not t.numel()
    pieces = {t.untyped_storage().data_ptr() for t in made.values() if t.numel()}
    assert (len(pieces) == 1) == (slab > 4096)
    save_file(made, tmp_path / "all.safetensors")
    assert all(torch.equal(t, given[name]) for name, t in load_file(tmp_path / "all.safetensors").items())
    given["0"].zero_()
    assert made["0"].any(), "a copy"


def test_on_host_copies():
    given = tensors()
    made = on_host({**given, "p": torch.nn.Parameter(torch.ones(3))})
    assert list(made) == [*given, "p"] and not made["p"].requires_grad
    given["0"].zero_()
    assert made["0"].any() and made["strided"].is_contiguous()


@pytest.mark.gpu
def test_on_host_of_a_gpu():
    given = {name: t.cuda() for name, t in tensors().items()} | {"here": torch.ones(3)}
    made = on_host(given)
    assert list(made) == list(given) and made["0"].is_pinned() and made["0"].device.type == "cpu"
    assert all(torch.equal(made[name], t.cpu()) for name, t in given.items())
