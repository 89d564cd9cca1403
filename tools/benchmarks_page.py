"""Writes docs/benchmarks.md from the CSV files of bench/results: `python tools/benchmarks_page.py`."""

from __future__ import annotations

import csv
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every file of bench/results as a table, written by `python tools/benchmarks_page.py`; a test holds this page to the
files. Medians; competitors of one date and commit ran in one process, in turns, after their results were held against
float64. A row without a number says why there is none. What was measured outside of such a run, and what limits a
kernel, stands in the room's own notes.
"""
MACHINE = ("machine", "date", "commit", "torch", "triton")
# what a table of anything but ops shows
SHOWN = {
    "e2e": (
        "size",
        "method",
        "batch",
        "seq",
        "checkpointing",
        "competitor",
        "tokens_s",
        "median_ms",
        "peak_gib",
        "commit",
    ),
    "decode": (
        "size",
        "weights",
        "cache",
        "slots",
        "context",
        "path",
        "graphs",
        "tokens_s",
        "best_tokens_s",
        "median_ms",
        "kernels_ms",
        "of_bound",
    ),
    "load": ("size", "weights", "stored_gib", "load_s", "held_gib", "peak_gib", "layer_gib", "host_anonymous_peak_gib"),
    "step": (
        "step",
        "variant",
        "median_ms",
        "host_ms",
        "launches",
        "tokens_s",
        "peak_gib",
        "pool_gib",
        "capture_s",
        "commit",
    ),
    "many_gpus": (
        "case",
        "size",
        "processes",
        "batch",
        "seq",
        "status",
        "tokens_s",
        "times_one",
        "peak_gib",
        "cap_gib",
        "commit",
    ),
    "learn": (
        "size",
        "cache",
        "slots",
        "window",
        "prompt",
        "reply",
        "chunk",
        "recompute",
        "learning",
        "tokens_s",
        "p50_ms",
        "p95_ms",
        "p99_9_ms",
        "longest_ms",
        "learn_ms",
        "plain_ms",
        "adjoint_mib",
        "learn_peak_mib",
        "reserved_gib",
        "cosine",
        "commit",
    ),
    "sft": ("method", "competitor", "steps", "wall_s", "cpu_s", "peak_mib", "first_loss", "last_loss"),
}


def number(text: str) -> str:
    """Four digits of a number; anything else as it is."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if text.isdigit() else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def of_ops(rows: list[dict[str, str]]) -> str:
    """A row a case and pass, a column a competitor: ms, and beside riftco's the rate and the peak."""
    peers = list(dict.fromkeys(r["peer"] for r in rows))
    key = ("op", "case", "shape", "pass", "commit")  # what was measured at two commits is two rows
    found = {(*(r[k] for k in key), r["peer"]): r for r in rows}
    many = len({r["commit"] for r in rows}) > 1
    lines = []
    for case in dict.fromkeys(tuple(r[k] for k in key) for r in rows):
        ours = found.get((*case, "riftco"), {})
        rates = [number(ours.get(rate, "")) for rate in ("tflop_s", "gb_s")]
        cells = [cell(found.get((*case, peer))) for peer in peers]
        _, name, shape, passed, commit = case
        lines.append([f"{name}, {shape}", passed, *cells, *rates, *[commit] * many])
    head = ["case", "pass", *(f"{peer}, ms" for peer in peers), "riftco's TFLOP/s", "GB/s", *["commit"] * many]
    return table(head, lines)


def cell(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    return number(row["median_ms"]) if row["status"] == "ok" else row["why"].split(";")[0].split("(")[0][:60].strip()


def of_kinds(rows: list[dict[str, str]]) -> str:
    """A step's kernels added up by kind."""
    steps = list(dict.fromkeys(r["size"] for r in rows))
    kinds = dict.fromkeys(r["kernel"] if r["kind"] == "step" else r["kind"] for r in rows)
    sums = dict.fromkeys(((s, k) for s in steps for k in kinds), 0.0)
    for r in rows:
        sums[r["size"], r["kernel"] if r["kind"] == "step" else r["kind"]] += float(r["ms"])
    lines = [[kind, *(f"{sums[s, kind]:.2f}" for s in steps)] for kind in kinds]
    return table(["kernels", *(f"{s}, ms" for s in steps)], lines)


def section(file: pathlib.Path) -> str:
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    name = file.stem.split("-", 3)[3]
    kind = name.split("-")[0]
    if "op" in rows[0]:
        body = of_ops(rows)
    elif "kernel" in rows[0]:
        body = of_kinds(rows)
    else:
        shown = [s for s in SHOWN[kind] if s in rows[0]]
        body = table([s.replace("_", " ") for s in shown], [[number(r[s]) for s in shown] for r in rows])
    runs = dict.fromkeys(tuple(r.get(m, "")[: 10 if m == "date" else None] for m in MACHINE) for r in rows)
    said = "; ".join(
        f"{machine}, {date}, commit {commit}, torch {torch}, Triton {triton or 'none'}"
        for machine, date, commit, torch, triton in runs
    )
    return f"## {name}, {file.stem[:10]}\n[{file.name}](../bench/results/{file.name}): {said}\n\n{body}"


def page() -> str:
    files = sorted(RESULTS.glob("*.csv"), key=lambda f: (f.stem.split("-", 3)[3], f.stem))
    return "\n".join([HEAD, *map(section, files)])


if __name__ == "__main__":
    PAGE.write_text(page())
