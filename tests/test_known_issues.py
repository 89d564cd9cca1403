"""docs/known_issues.md: each fault that is carried is still there, and nothing is carried that is not in its table."""

import ast
import pathlib
import re
import tomllib

import pytest
import support
import torch

from riftco import functional as F

TESTS = pathlib.Path(__file__).parent
PAGE = TESTS.parent / "docs" / "known_issues.md"
INTERPRETED = next(d for d in support.DEVICES if d.name == "cpu-triton")


def test_every_issue_has_a_test_that_shows_it():
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    shown = [re.fullmatch(r"`tests/test_known_issues\.py::(\w+)`", row[-1].strip())[1] for row in rows]
    assert rows and all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
    here = {n.name for n in ast.parse(pathlib.Path(__file__).read_text()).body if isinstance(n, ast.FunctionDef)}
    others = {"test_every_issue_has_a_test_that_shows_it", "test_no_test_is_expected_to_fail"}
    assert sorted(shown) == sorted(n for n in here - others if n.startswith("test_"))


def test_no_test_is_expected_to_fail():
    """Neither by a mark nor in the middle; a filter that lets a warning pass says whose it is, on the line above."""
    marked = [
        (file.name, node.attr)
        for file in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("xfail", "expectedFailure")
    ]
    assert not marked
    text = (TESTS.parent / "pyproject.toml").read_text()
    filters = tomllib.loads(text)["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert filters[0] == "error" and all(f.startswith("ignore:") for f in filters[1:])
    lines = text[text.index("filterwarnings") :].splitlines()[2:]
    assert lines[0].strip().startswith("#")


@pytest.mark.skipif(not INTERPRETED.available, reason=f"cpu-triton: {INTERPRETED.why_not}")
def test_the_interpreter_truncates_to_bfloat16():
    x = torch.tensor([1 + 2**-8 + 2**-9, 1.0, -1 - 2**-8 - 2**-9])
    with INTERPRETED.use():
        out = F.rms_norm(x.bfloat16()[None], eps=0.0)
    exact = (x.bfloat16().double() / x.bfloat16().double().square().mean().sqrt()).float()
    toward_zero = (exact.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(out[0].float(), toward_zero) and not torch.equal(out[0], exact.bfloat16())


def test_a_second_derivative_by_torch_func_is_not_there():
    x = torch.tensor([0.5, 1.0])

    def second(**options):
        once = torch.func.grad(lambda t: F.swiglu(t, t, **options).sum())
        return torch.func.grad(lambda t: once(t).sum())(x)

    assert torch.equal(second(), torch.zeros(2))
    torch.testing.assert_close(second(impl="spec"), torch.tensor([1.7005, 2.1577]), atol=1e-4, rtol=0)
    (once,) = torch.autograd.grad(F.swiglu(leaf := x.requires_grad_(), leaf).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton")))
def test_a_nan_leaves_its_packed_document(device):
    q, k, v = (torch.randn(16, 2, 32) for _ in range(3))
    v[:8] = torch.nan
    with device.use():
        out = F.attention(q, k, v, causal=True, cu_seqlens_q=torch.tensor([0, 8, 16], dtype=torch.int32))
    assert out[8:].isnan().any()


def test_weights_of_inference_mode_do_not_train():
    with torch.inference_mode():
        weight = torch.ones(8)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        F.rms_norm(torch.randn(2, 8, requires_grad=True), weight)
