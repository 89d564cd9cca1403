"""The step profile: kernels by kind, and a table of one step."""

import csv

import pytest

from riftco.bench import step_profile


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("_norm_bwd", "norms"),
        ("backward_kernel", "attention"),
        ("_groups", "weights decoded"),
        ("forward_rows", "loss"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something new", "other"),
    ],
)
def test_kinds(kernel, kind):
    assert step_profile.kind_of(kernel) == kind


def test_without_a_gpu_it_says_so(capsys):
    assert step_profile.main(["--device", "cpu"]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_tiny_step_is_taken_apart(tmp_path):
    out = tmp_path / "profile.csv"
    options = ["--size", "tiny", "--batch", "2", "--seq", "64", "--steps", "2", "--out", str(out)]
    assert step_profile.main(options) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"attention", "adapters", "norms", "optimizer"} <= {row["kind"] for row in rows}
    assert all(float(row["ms"]) >= 0 and float(row["launches"]) > 0 for row in rows)
