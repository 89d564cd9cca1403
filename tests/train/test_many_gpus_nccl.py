"""Two GPUs over NCCL give what one gives; a process that is killed ends the other, which waits inside a collective."""

import pathlib
import signal

import pytest
import rank_cases
import torch
from processes import ROOT, ended, start
from rank_cases import HEADS, TRAINED, head_inputs

from riftco.functional import linear_cross_entropy
from riftco.train import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs; here {torch.cuda.device_count()}"),
]
BUDGET = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for status, _, errors in ended(start(2, rank_cases.__file__, folder, "cuda"), 300):
        assert status == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(2)]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_one_gpu(two, name):
    one = TRAINED[name](Ranks("cuda:0"))
    for ours in (results[name] for results in two):
        assert ours["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert ours["norms"] == pytest.approx(one["norms"], rel=1e-3)
        assert ours["held out"] == pytest.approx(one["held out"], rel=1e-4)
        assert max(off(ours["weights"][n], w) for n, w in one["weights"].items()) < 1e-2
    first, second = (results[name]["weights"] for results in two)
    assert all(torch.equal(w, second[n]) for n, w in first.items()), "bit for bit the same on both"


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("rows", ["whole", "cut"])
@pytest.mark.parametrize("case", range(len(HEADS)))
def test_a_head_in_parts_is_the_whole_head(two, dtype, rows, case):
    x, w, b, target, weight = head_inputs(dtype, "cuda:0")
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    loss, lse = linear_cross_entropy(x, w, target, b, row_weight=weight, return_lse=True, **HEADS[case])
    loss.backward(torch.linspace(-1, 1, loss.numel()).to(loss).view(loss.shape) if loss.dim() else None)
    for results in two:
        pairs = zip(results["head"]["results"][dtype, case, rows], (loss, lse, x.grad, w.grad, b.grad))
        assert max(off(a, e) for a, e in pairs) < BUDGET[dtype]
    assert two[0]["head"]["gradcheck"]


def test_a_killed_process_ends_the_other(tmp_path):
    bench = pathlib.Path(ROOT) / "bench" / "many_gpus.py"
    options = ("--size", "tiny", "--batch", 1, "--seq", 64, "--steps", 300, "--out", tmp_path / "rows.csv")
    processes = start(2, "-u", bench, "speed", *options)
    stdout = processes[0].stdout
    assert stdout is not None
    for line in stdout:  # the first row: from here on both train
        if "1 x" in line:
            break
    processes[1].kill()
    (status, _, why), (killed, _, _) = ended(processes, 60)
    assert (status, killed) == (1, -signal.SIGKILL)
    assert "process 1 ended without a word" in why and "--resume goes on" in why
