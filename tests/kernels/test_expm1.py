"""Contract A5.9: p - 1 and e^x - 1 keep their digits, and are differenced where exp neither vanishes nor overflows."""

import pytest
import support
import torch

from riftco.functional import cross_entropy, linear_cross_entropy, topk_cross_entropy
from riftco.kernels.adam.equations import Update
from riftco.train.losses import grpo_loss

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
POINTS = torch.tensor([-2.0, 0.0, 0.5, 3.0], dtype=torch.float64)


def kl(gap, dtype=torch.float64):
    """The estimated KL divergence of grpo_loss for one token whose reference is `gap` likelier, and its gradient."""
    logits = torch.tensor([[[0.3, -0.2, 0.1]]], dtype=dtype)
    log_p = logits.log_softmax(-1)[..., 0].detach()
    leaf = logits.clone().requires_grad_()
    none = torch.zeros(1, dtype=dtype)
    loss = grpo_loss(leaf, torch.tensor([[0]]), none, reference=log_p + gap, beta=1.0)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), float(grad[0, 0, 0] / (1 - log_p.exp()[0, 0]))  # d loss / d log_p


def test_the_gradient_of_e_to_the_x_minus_one_is_e_to_the_x():
    """At points of one number each, on 1,024 elements; by differences within [-2, 2], where exp stays in range."""
    x = POINTS.repeat(256).requires_grad_()
    (got,) = torch.autograd.grad(torch.expm1(x).sum(), x)
    torch.testing.assert_close(got, x.detach().exp(), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(torch.expm1, torch.linspace(-2, 2, 9, dtype=torch.float64).requires_grad_())
    for gap in POINTS.tolist():
        loss, slope = kl(gap)
        assert float(loss) == pytest.approx(float(torch.tensor(gap).double().exp()) - gap - 1, abs=1e-12)
        assert slope == pytest.approx(1 - float(torch.tensor(gap).double().exp()), abs=1e-9)
        step = 1e-4
        differences = (float(kl(gap - step)[0]) - float(kl(gap + step)[0])) / (2 * step)  # gap = reference - log_p
        assert slope == pytest.approx(differences, abs=1e-6)


@pytest.mark.parametrize("gap", [1e-3, -1e-3])
def test_a_small_divergence_is_no_rounding_error(gap):
    """e^g - g - 1 of a small g is g^2 / 2, which is far below the last digit of 1 in float32."""
    wide, narrow = kl(gap)[0], kl(gap, torch.float32)[0]
    assert float(narrow) == pytest.approx(float(wide), rel=5e-3) and float(narrow) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", ["cross_entropy", "topk", "sliced head"])
def test_a_confident_row_keeps_its_gradient(device, loss):
    """The label's gradient p - 1 where p is 1 but for 1e-1 to 1e-12: six digits, where the difference has none."""
    on = device.torch_device
    margins = torch.linspace(2.0, 28.0, 14)
    logits = torch.stack([margins, torch.zeros(14), torch.full((14,), -1.0)], -1)
    target = torch.zeros(14, dtype=torch.int64)
    exact = logits.double().requires_grad_()
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(exact, target, reduction="sum"), exact)[0][:, 0]
    others = -exact.detach().softmax(-1)[:, 1:].sum(-1)  # p - 1, without the difference
    torch.testing.assert_close(want, others, rtol=1e-3, atol=1e-16)
    with device.use():
        if loss == "sliced head":  # the head is the identity: its gradient's first row is the logits' first column
            x = logits.to(on).requires_grad_()
            made = linear_cross_entropy(x, torch.eye(3, device=on), target.to(on), reduction="sum")
        else:
            x = logits.to(on).requires_grad_()
            made = (
                cross_entropy(x, target.to(on), reduction="sum") if loss == "cross_entropy" else
                topk_cross_entropy(x, target[:, None].to(on), torch.ones(14, 1, device=on), reduction="sum")
            )  # fmt: skip
        (got,) = torch.autograd.grad(made, x)
    torch.testing.assert_close(got[:, 0].double().cpu(), others, rtol=2e-6, atol=0)


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_adams_correction_of_a_slow_moment(step):
    """1 - 0.999^t in float32: 1 - 0.999 itself has five digits there."""
    t = torch.tensor(float(step))
    update = Update(t, torch.tensor(True), t, t, 0.9, 0.999, 1e-8, 0.0, True)
    assert float(update._correction(0.999)) == pytest.approx(1 - 0.999**step, rel=3e-7)
