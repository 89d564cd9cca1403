"""Fused residual adds and shortened replays are for blocks that nobody else sees: hooks, wrappers, replaced modules."""

import pytest
import torch
from support import poisoned
from test_adapted_decoder import IDS, adapted_decoder
from torch import nn
from torch.utils.checkpoint import checkpoint

from riftco.functional import last_product, recomputed, swiglu
from riftco.nn import LoRALinear

MODES = ("disabled", "block")


class Behind(nn.Module):
    """A module with a trained one behind it, which saves what it reads."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.more = inner, nn.Linear(64, 64)
        nn.init.normal_(self.more.weight, std=0.3, generator=torch.Generator().manual_seed(2))

    def forward(self, x, *more):
        y = self.inner(x, *more)
        return y + torch.tanh(self.more(y))


def learned(model, mode):
    model.activation_checkpointing = mode
    model.zero_grad()
    with poisoned():
        loss = model.loss(IDS, IDS.roll(-1, 1))
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found, wanted):
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("where", ["", "mlp", "mlp.down_proj"])
def test_a_hook_with_a_gradient_reads_a_product_that_was_made(where):
    """A trained gain on what a block, or its MLP, returns: its gradient is made of the values."""
    model = adapted_decoder()
    model.gain = nn.Parameter(torch.linspace(0.5, 1.5, 64))
    block = model.model.layers[0]
    block.get_submodule(where).register_forward_hook(lambda module, args, out: out * model.gain)
    assert_equal(learned(model, "block"), learned(model, "disabled"))


@pytest.mark.parametrize("where", ["layers.1", "layers.1.mlp"])
def test_a_wrapper_reads_a_product_that_was_made_and_is_called(where):
    model = adapted_decoder()
    model.model.set_submodule(where, Behind(model.model.get_submodule(where)))
    plain = learned(model, "disabled")
    assert plain[1][f"model.{where}.more.weight"].abs().sum() > 0
    assert_equal(learned(model, "block"), plain)


@pytest.mark.parametrize("mode", MODES)
def test_backward_hooks_of_a_block_are_called(mode):
    model, calls = adapted_decoder(), []
    block = model.model.layers[1]
    block.register_full_backward_pre_hook(lambda *args: calls.append("before"))
    block.register_full_backward_hook(lambda *args: calls.append("after"))
    learned(model, mode)
    assert calls == ["before", "after"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["norm", "layers.1.input_layernorm", "layers.1.post_attention_layernorm"])
def test_a_hook_on_a_norm_sees_hidden_states(name, mode):
    """One tensor in, one out, as in Hugging Face's models; with a batch of 2 a pair would even be taken apart."""
    model, seen = adapted_decoder(), []
    plain = learned(model, mode)
    norm = model.model.get_submodule(name)
    norm.register_forward_hook(lambda module, args, out: seen.append((len(args), args[0].detach(), out.detach())))
    assert_equal(learned(model, mode), plain)
    count, x, out = seen[0]
    assert count == 1
    torch.testing.assert_close(out, nn.functional.rms_norm(x, (64,), norm.weight, norm.eps))


@pytest.mark.parametrize("mode", MODES)
def test_the_last_norm_may_be_replaced(mode):
    model = adapted_decoder()
    plain = learned(model, mode)
    model.model.norm = nn.RMSNorm(64, eps=model.model.norm.eps).requires_grad_(False)
    assert_equal(learned(model, mode), plain)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_retained_is_gone_through_again(mode):
    model = adapted_decoder()
    _, once = learned(model, mode)
    loss = model.loss(IDS, IDS.roll(-1, 1))
    some = [p for name, p in model.named_parameters() if "layers.0.mlp.down_proj.lora_B" in name]
    parts = torch.autograd.grad(loss, some, retain_graph=True)
    model.zero_grad()
    with poisoned():
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(parts[0], once["model.layers.0.mlp.down_proj.lora_B.weight"])
    for name, grad in once.items():
        torch.testing.assert_close(model.get_parameter(name).grad, 2 * grad, rtol=1e-4, atol=1e-6, msg=name)


def test_under_autocast_the_sums_and_the_last_norm_stay_wide():
    """As without fusing them, which checkpointing is."""
    model, seen = adapted_decoder(), []
    for mode in MODES:
        model.activation_checkpointing = mode
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(model.hidden(IDS).detach())
    assert seen[0].dtype == seen[1].dtype == torch.float32
    assert torch.equal(*seen)


def test_a_checkpoint_over_two_blocks_takes_each_product_for_its_own():
    """The backward begins with the first of them, where nothing but what it gives reaches the loss."""
    torch.manual_seed(0)
    layers = [LoRALinear(nn.Linear(8, 16), 2, 4) for _ in range(2)]
    for layer in layers:
        nn.init.normal_(layer.lora_B.weight)

    def both(x):
        outs = []
        for layer in layers:
            h = swiglu(x, x + 1)
            with recomputed(h):
                x = last_product(layer, h)
            outs.append(x)
            x = x[:, :8]
        return tuple(outs)

    def grads(run):
        x = torch.linspace(-2, 2, 24).view(3, 8).requires_grad_()
        first, _ = run(x)
        return torch.autograd.grad(first.square().sum(), [x, layers[0].lora_A.weight, layers[0].lora_B.weight])

    for found, wanted in zip(grads(lambda x: checkpoint(both, x, use_reentrant=False)), grads(both)):
        torch.testing.assert_close(found, wanted)
