"""Contract A5.5: a zero gradient is written, never a product with what is not finite; and none stays behind."""

import gc

import pytest
import support
import torch

from riftco import functional as F
from riftco.kernels import _check

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
ROOMS = support.rooms()
NAN = torch.nan


def embedding(on):
    """Rows that no id names, beside an upstream of NaN at a padded one."""
    weight = torch.randn(6, 8, device=on, requires_grad=True)
    ids = torch.tensor([1, 3, 1, 0], device=on)
    d = torch.ones(4, 8, device=on)
    d[3] = NAN
    (got,) = torch.autograd.grad(F.embedding(ids, weight, padding_idx=0), weight, d)
    return got[[0, 2, 4, 5]]


def replaced_rows(on):
    """x's gradient at rows that were replaced, and the gradient of a row that a later one replaced."""
    x, rows = torch.randn(5, 8, device=on, requires_grad=True), torch.randn(3, 8, device=on, requires_grad=True)
    d = torch.ones(5, 8, device=on)
    d[2] = NAN
    out = F.scatter_rows(x, torch.tensor([2, 4, 2], device=on), rows)
    d_x, d_rows = torch.autograd.grad(out, (x, rows), d)
    return torch.stack([d_x[2], d_x[4], d_rows[0]])


def unlabelled_rows(on):
    """Logits that are no numbers where there is no label or no weight."""
    x = torch.randn(4, 9, device=on)
    x[1], x[2] = NAN, torch.inf
    x.requires_grad_()
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0], device=on)
    target = torch.tensor([3, -100, 1, -1], device=on)
    loss = F.cross_entropy(x, target, row_weight=weight, reduction="sum")
    assert loss.isfinite()
    return torch.autograd.grad(loss, x)[0][1:]


def unlabelled_hidden(on):
    """Of the sliced head: hidden states that are no numbers where there is no label."""
    x, head = torch.randn(4, 16, device=on), torch.randn(9, 16, device=on, requires_grad=True)
    x[1], x[3] = NAN, -torch.inf
    x.requires_grad_()
    loss = F.linear_cross_entropy(x, head, torch.tensor([3, -100, 1, -100], device=on))
    d_x, d_head = torch.autograd.grad(loss, (x, head))
    assert loss.isfinite() and d_head.isfinite().all()
    return d_x[[1, 3]]


def keys_behind_the_lengths(on):
    """Keys and values that no query may see."""
    q, k, v = (torch.randn(2, 8, 2, 32, device=on) for _ in range(3))
    k[1, 5:], v[1, 5:] = NAN, torch.inf
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = F.attention(*leaves, k_lens=torch.tensor([8, 5], dtype=torch.int32, device=on))
    d_q, d_k, d_v = torch.autograd.grad(out.sum(), leaves)
    assert all(t.isfinite().all() for t in (out, d_q, d_k, d_v))
    return torch.stack([d_k[1, 5:], d_v[1, 5:]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "zeros", [embedding, replaced_rows, unlabelled_rows, unlabelled_hidden, keys_behind_the_lengths]
)
def test_zeros_are_no_products(zeros, device):
    with device.use(), support.poisoned():
        got = zeros(device.torch_device)
    assert got.numel() and torch.equal(got, torch.zeros_like(got))


def living():
    """Bytes of all tensors that Python reaches, each memory once."""
    gc.collect()
    found = {}
    for t in gc.get_objects():
        if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided:
            storage = t.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton")))
@pytest.mark.parametrize("room", [r for r in ROOMS if r != "adam"])
def test_nothing_stays_of_a_step(room, device):
    """Neither zeros, accumulators nor workspaces of any case: what its forward and backward took is given back."""
    cases = ROOMS[room]
    small = [c for c in cases.CASES if not c.slow and support.serves(cases, device.name, c)]
    small = small[:: 1 if device.name == "cpu" else 12]

    def run():
        for case in small:
            inputs = _check.to(_check.inputs_of(cases, case, torch.float32), torch.float32, device.torch_device)
            with device.use():
                _check.outputs_and_grads(cases.call, cases, case, inputs)

    run()  # what is made once: tables, workspaces that a device keeps
    before = living()
    run()
    assert living() == before


@pytest.mark.parametrize("device", DEVICES)
def test_an_expanded_upstream_is_read_as_it_lies(device):
    """The gradient of a sum is one number, repeated: strides of 0 give what a tensor of ones gives; its bits in the
    interpreter and on the CPU, while a GPU's lanes take strides apart in another order and sum in it."""
    x, y = (torch.randn(6, 32, device=device.torch_device, requires_grad=True) for _ in range(2))
    w = torch.randn(32, device=device.torch_device, requires_grad=True)
    one = torch.ones((), device=device.torch_device)
    for fn, leaves in (
        (lambda: F.rms_norm(x, w), (x, w)),
        (lambda: F.layer_norm(x, w), (x, w)),
        (lambda: F.swiglu(x, y), (x, y)),
        (lambda: F.embedding(torch.tensor([1, 1, 3], device=x.device), x), (x,)),
    ):
        with device.use():
            out = fn()
            got = torch.autograd.grad(out, leaves, one.expand(out.shape), retain_graph=True)
            want = torch.autograd.grad(out, leaves, torch.ones_like(out))
        for a, b in zip(got, want):
            support.assert_same_sums(a, b)
