"""`python bench/sft.py --steps 30`: examples/sft.py patched and plain, one after the other; a row each in results/."""

import argparse
import pathlib
import re
import subprocess
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from riftco.bench.machine import machine_columns  # noqa: E402
from riftco.bench.rows import append, file_of  # noqa: E402


def measured(arguments: list[str]) -> tuple[list[float], dict[str, float]]:
    """Losses of the steps, and seconds and MiB of the run, as the example prints them."""
    command = [sys.executable, "-W", "ignore", str(HERE.parent / "examples" / "sft.py"), *arguments]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"wall ([\d.]+) s, cpu ([\d.]+) s, peak of the process (\d+) MiB", out)
    assert found, out
    losses = [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)", out, re.M)]
    return losses, dict(zip(("wall_s", "cpu_s", "peak_mib"), map(float, found.groups())))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--lora", action="store_true")
options = parser.parse_args()
given = ["--steps", str(options.steps), "--length", str(options.length), *(["--lora"] if options.lora else [])]
plain, patched = measured([*given, "--plain"]), measured(given)
difference = max(abs(a - b) / a for a, b in zip(plain[0], patched[0], strict=True))
rows = [
    {
        "method": "lora" if options.lora else "full", "competitor": name, "steps": options.steps,
        "tokens_step": 4 * options.length, **spent, "first_loss": losses[0], "last_loss": losses[-1],
        "max_relative_loss_difference": f"{difference:.2e}", **machine_columns("cpu"),
    }
    for name, (losses, spent) in (("transformers+TRL", plain), ("riftco.patch", patched))
]  # fmt: skip
file = file_of(None, HERE / "results", f"sft-{'cuda' if torch.cuda.is_available() else 'cpu'}")
append(file, list(rows[0]), rows)
print(file.read_text())
