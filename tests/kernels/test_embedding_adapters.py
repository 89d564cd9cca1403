"""LoRA on an embedding and trained rows: the dense meaning in every dtype, with gradients; heads that share them."""

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import sliced_head_loss

V, C, R = 13, 9, 3
IDS = torch.tensor([[4, 0, 4, 12], [7, 4, 0, 1]])


def lora(dtype=torch.float64, adapter=torch.float64, **options):
    torch.manual_seed(1)
    layer = nn.LoRAEmbedding(nn.Embedding(V, C, dtype=dtype), R, 2.0, dtype=adapter, **options)
    with torch.no_grad():
        for p in layer.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.3)
    return layer


def dense(layer):
    """The matrix that the layer looks up in, with a graph to its parameters."""
    w = layer.weight.double() + layer.scale * (layer.lora_embedding_B.double() @ layer.lora_embedding_A.double()).t()
    if layer.lora_magnitude_vector is None:
        return w
    return w * (layer.lora_magnitude_vector.double() / w.detach().norm(dim=0))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("device", support.DEVICES[:2], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_dense_matrix(dtype, device, use_dora):
    if not device.available:
        pytest.skip(device.name)
    layer = lora(dtype, torch.float32, use_dora=use_dora)
    up = torch.randn(*IDS.shape, C, dtype=dtype)
    trained = [p for p in layer.parameters() if p.requires_grad]
    assert len(trained) == 2 + use_dora
    with device.use(), support.poisoned():
        out = layer(IDS)
        got = torch.autograd.grad(out, trained, up)
    want = F.embedding(IDS, dense(layer))
    grads = torch.autograd.grad(want, trained, up.double())
    ulp = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=2 * ulp, atol=2 * ulp)
    for a, b in zip(got, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * ulp, atol=8 * ulp)


@pytest.mark.parametrize("use_dora", [False, True])
def test_gradcheck(use_dora):
    layer = lora(use_dora=use_dora)
    names = [n for n, p in layer.named_parameters() if p.requires_grad]

    def run(*values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (IDS,))

    if use_dora:  # the norm is a constant to the gradient, which finite differences cannot know
        norm = layer.weight_norm()
        layer.weight_norm = lambda: norm
    assert torch.autograd.gradcheck(run, [layer.get_parameter(n).detach().requires_grad_() for n in names])


def test_padding_strides_and_no_ids():
    base = nn.Embedding(V, C, padding_idx=4)
    layer = nn.LoRAEmbedding(base, R, 2.0)
    torch.nn.init.normal_(layer.lora_embedding_A)
    layer(IDS.t()).sum().backward()
    grad = layer.lora_embedding_A.grad
    assert grad[:, 4].eq(0).all() and grad[:, 0].ne(0).all() and base.weight.grad is None
    assert layer(IDS[:0]).shape == (0, 4, C)
    torch.testing.assert_close(layer(IDS[:, ::2]), layer(IDS)[:, ::2])


def test_a_scaled_embedding_scales_the_adapter_too():
    class Scaled(torch.nn.Embedding):
        embed_scale = 3.0

        def forward(self, input):
            return super().forward(input) * self.embed_scale

    base = Scaled(V, C)
    layer, plain = nn.LoRAEmbedding(base, R, 2.0), nn.LoRAEmbedding(torch.nn.Embedding(V, C), R, 2.0)
    torch.nn.init.normal_(layer.lora_embedding_A)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(IDS), 3 * plain(IDS))
    rows, bare = nn.TrainableTokens(base, [4, 7]), nn.TrainableTokens(plain.base_layer, [4, 7])
    torch.testing.assert_close(rows(IDS), 3 * bare(IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_rows_are_those_rows(dtype):
    base = nn.Embedding(V, C, dtype=dtype)
    layer = nn.TrainableTokens(base, [4, 12])
    assert torch.equal(layer(IDS), base(IDS))
    with torch.no_grad():
        layer.trainable_tokens_delta.add_(1)
    whole = base.weight.detach().clone().requires_grad_()
    want = F.embedding(IDS, whole.index_copy(0, torch.tensor([4, 12]), layer.trainable_tokens_delta.detach().to(dtype)))
    assert torch.equal(layer(IDS), want)
    up = torch.randn(*IDS.shape, C, dtype=dtype)
    (got,) = torch.autograd.grad(layer(IDS), [layer.trainable_tokens_delta], up)
    expected = torch.stack([up[IDS == 4].float().sum(0), up[IDS == 12].float().sum(0)])
    torch.testing.assert_close(got, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)
    with pytest.raises(ValueError, match=r"must be in \[0, 13\); got 13"):
        nn.TrainableTokens(base, [13])
    with pytest.raises(ValueError, match="must be distinct"):
        nn.TrainableTokens(base, [1, 1])


def shared(kind, bias):
    torch.manual_seed(3)
    base = nn.Embedding(V, C)
    head = torch.nn.Linear(C, V, bias=bias)
    head.weight = base.weight
    if kind == "lora":
        embedding = nn.LoRAEmbedding(base, R, 2.0)
        torch.nn.init.normal_(embedding.lora_embedding_A)
        return embedding, nn.TiedLoRALinear(head, embedding)
    embedding = nn.TrainableTokens(base, [4, 12, 0])
    torch.nn.init.normal_(embedding.trainable_tokens_delta)
    return embedding, nn.TokensHead(head, embedding)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["lora", "rows"])
def test_a_shared_head_through_the_sliced_loss(kind, bias):
    embedding, head = shared(kind, bias)
    x, target = torch.randn(2, 4, C, requires_grad=True), IDS
    trained = [p for p in embedding.parameters() if p.requires_grad]
    assert trained and not any(p.requires_grad for p in head.parameters())
    want = F.cross_entropy(head(x).flatten(0, 1), target.flatten())
    got = sliced_head_loss(x, head, target)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, [x, *trained]), torch.autograd.grad(want, [x, *trained]), strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if kind == "rows":
        weight = embedding.weight.index_copy(0, embedding.ids, embedding.trainable_tokens_delta)
        torch.testing.assert_close(head(x), F.linear(x, weight, head.base_layer.bias))
    assert (head.in_features, head.out_features) == (C, V)


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ValueError, match="max_norm or sparse=True cannot be adapted"):
        nn.LoRAEmbedding(torch.nn.Embedding(V, C, max_norm=1.0), R, 1.0)
    with pytest.raises(ValueError, match="a DoRA cannot be shared"):
        nn.TiedLoRALinear(torch.nn.Linear(C, V), lora(use_dora=True))
