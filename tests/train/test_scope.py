"""What a with-block was given is gone at its end, whoever holds a name; gradients stay."""

import weakref

import pytest
import torch

from riftco.functional import cross_entropy
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.train import Scope


def model():
    torch.manual_seed(0)
    return Decoder(DecoderConfig("llama", 64, 32, 48, 2, 4, 2, 8, 64, Rope(8, 1e4)))


def memory_of(t):
    return weakref.ref(t.untyped_storage())


def test_logits_loss_and_graph_are_released_and_gradients_stay():
    made, ids = model(), torch.randint(64, (2, 9))
    cross_entropy(made(ids), ids).backward()
    want = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    with Scope() as scope:
        logits = scope(made(ids))
        loss = scope(cross_entropy(logits, ids))
        memory, value = [memory_of(logits), memory_of(loss)], loss.item()
        loss.backward()
        assert all(m() is not None for m in memory) and value > 0
    assert not any(m() for m in memory), "names are still there, memory is not"
    assert logits.numel() == loss.numel() == 0 and loss.grad_fn is None
    assert all(torch.equal(p.grad, w) for p, w in zip(made.parameters(), want, strict=True))
    with pytest.raises(RuntimeError):
        logits + torch.zeros(2, 9, 64)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_releases_too_and_without_a_backward_the_whole_graph_goes(error):
    made, ids = model(), torch.randint(64, (2, 9))
    kept = []
    seen = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(memory_of(t)) or t.detach(), lambda t: t)
    with seen, pytest.raises(error), Scope() as scope:
        loss = scope(made.loss(ids, ids, n_labelled=18))
        raise error
    held = {p.untyped_storage()._cdata for p in made.parameters()}
    alive = [m() for m in kept if m() is not None]
    assert len(kept) > 20 and loss.numel() == 0
    # parameters, ids and the rotation's frequencies live on
    assert all(s._cdata in held or s.nbytes() <= ids.untyped_storage().nbytes() for s in alive)


def test_one_scope_in_another():
    with Scope() as outer:
        a = outer(torch.ones(3) * 2)
        with Scope() as inner:
            b = inner(a * 3)
            c = a * 4
        assert b.numel() == 0 and a.tolist() == [2, 2, 2]
    assert a.numel() == 0 and c.tolist() == [8, 8, 8]


def test_what_it_refuses():
    with Scope() as scope:
        with pytest.raises(ValueError, match="a parameter stays"):
            scope(torch.nn.Parameter(torch.ones(2)))
        x = torch.ones(4)
        with pytest.raises(ValueError, match="a view has no memory of its own"):
            scope(x[:2])
    assert x.numel() == 4
