"""The one place that names the TPU's device, with and without torch_xla."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest
import support
import torch

from riftco import explain, tpu
from riftco.functional import cross_entropy
from riftco.kernels import _contract
from riftco.kernels.cross_entropy.spec import no_metrics


def test_without_torch_xla_the_error_says_what_to_do(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else find(name))
    assert f"torch {torch.__version__}" in tpu.why_not()
    with pytest.raises(RuntimeError, match=r"no TPU: torch_xla is not installed.*make tpu-env"):
        tpu.device()


@pytest.mark.xla
@pytest.mark.parametrize("device", support.device_params(("xla",)))
def test_with_torch_xla(device):
    assert tpu.why_not() == ""
    assert tpu.device().type == tpu.DEVICE_TYPE == torch.ones(2).to(tpu.device()).device.type


@pytest.mark.xla
@pytest.mark.parametrize("device", support.device_params(("xla",)))
def test_writes_through_views_inside_a_launcher_are_kept(device, monkeypatch):
    """Without help torch_xla drops them in silence inside an operator."""

    def launcher(logits, target, *options):
        loss = logits.new_zeros(target.shape, dtype=torch.float32)
        loss[:2] = 5.0
        loss.view(2, 2)[1].add_(logits.view(2, 2, 3)[1, :, 0])
        return loss, loss.clone(), torch.ones_like(loss), *no_metrics(logits)

    monkeypatch.setattr(_contract, "load", lambda path: launcher)
    x = torch.arange(12.0).view(4, 3).to(tpu.device())
    loss, lse = cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device), reduction="none", return_lse=True)
    assert loss.tolist() == [5, 5, 6, 9] and lse.tolist() == [6, 6, 7, 10]


def test_launchers_need_no_torch_xla_to_be_named():
    code = (
        "import sys; sys.modules['torch_xla'] = None\nimport riftco.tpu, riftco.tpu.cross_entropy, riftco.functional\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).parents[2])


def test_explain_names_the_launcher():
    rows = {r["op"]: r["implementation"] for r in explain("xla")}
    assert rows["cross_entropy_fwd"] == "riftco.tpu.cross_entropy:forward"
    assert rows["cross_entropy_bwd"] == "riftco.tpu.cross_entropy:backward"
