"""Figures from a bench CSV: for an op, and for each pass of it that has a rate, bars of peers side by side under the
measured roof of the machine; and memory beside time for cases that are run at several budgets."""

from __future__ import annotations

import csv
import itertools
import pathlib
import re
import textwrap

ROOFS = {"tflop_s": ("TFLOP/s", "roof_matmul_tflop_s", "matmul"), "gb_s": ("GB/s", "roof_copy_gb_s", "copy")}


OURS, PEERS = "#2b5fd9", ("#e08b3e", "#5aa469", "#a05fb4", "#8c6d57", "#4fa3b8", "#9aa3ad", "#c2b04a", "#d06a7f")
INK, PALE = "#333333", "#e3e6ea"


def read(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


BUDGET = re.compile(r"(?P<case>.*), (?P<mib>\d+) MiB")  # how a case's name ends that is one of several budgets


def _wrapped(label: str) -> str:
    """Short enough for a label of the axis to leave its neighbours their room."""
    return "\n".join(textwrap.fill(line, 22) for line in label.split("\n"))


def unit_of(rows: list[dict[str, str]]) -> str:
    """The rate whose roof is the nearer one for most of the rows: what bounds the op. Of a part of it only operations
    are counted."""
    if not all(r["gb_s"] for r in rows):
        return "tflop_s"
    compute = sum(
        float(r["tflop_s"]) / float(r["roof_matmul_tflop_s"]) > float(r["gb_s"]) / float(r["roof_copy_gb_s"])
        for r in rows
    )
    return "tflop_s" if 2 * compute >= len(rows) else "gb_s"


def plot(path: str | pathlib.Path) -> list[pathlib.Path]:
    """Draw the CSV at `path`; returns the PNG files, written beside it. Rows without a rate are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = pathlib.Path(path)
    timed = [r for r in read(path) if r["tflop_s"] and not BUDGET.fullmatch(r["case"])]
    images = []
    for op, which in dict.fromkeys((r["op"], r["pass"]) for r in timed):
        rows = [r for r in timed if (r["op"], r["pass"]) == (op, which)]
        unit = unit_of(rows)
        label, roof_column, roof_name = ROOFS[unit]
        labels = list(dict.fromkeys(f"{r['case']}\n{r['shape']}" for r in rows))
        peers = list(dict.fromkeys(r["peer"] for r in rows))
        width = 0.8 / len(peers)
        colors = dict(zip([p for p in peers if p != "riftco"], itertools.cycle(PEERS)))
        size = (max(7.0, 1.0 + len(labels) * len(peers) * 0.45), 4.5)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for i, peer in enumerate(peers):
            mine = [r for r in rows if r["peer"] == peer]
            at = [labels.index(f"{r['case']}\n{r['shape']}") + (i - (len(peers) - 1) / 2) * width for r in mine]
            rates = [float(r[unit]) for r in mine]
            slow = [rate * (1 - float(r["median_ms"]) / float(r["p90_ms"])) for rate, r in zip(rates, mine)]
            fast = [rate * (float(r["median_ms"]) / float(r["p10_ms"]) - 1) for rate, r in zip(rates, mine)]
            axes.bar(
                at, rates, width * 0.92, label=peer, color=colors.get(peer, OURS), yerr=[slow, fast],
                error_kw={"elinewidth": 0.9, "ecolor": INK},
            )  # fmt: skip
        roof = float(rows[0][roof_column])
        axes.axhline(roof, color=INK, linestyle="--", linewidth=1)
        axes.annotate(
            f"measured {roof_name}: {roof:.4g} {label}", (0, roof), xycoords=("axes fraction", "data"),
            xytext=(4, 3), textcoords="offset points", fontsize=8,
        )  # fmt: skip
        axes.set_xticks(range(len(labels)), [_wrapped(text) for text in labels], fontsize=8)
        axes.set_ylabel(f"{label}, {which}", fontsize=9)
        axes.tick_params(axis="y", labelsize=8, length=0)
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", color=PALE)
        axes.set_axisbelow(True)
        axes.set_ylim(0, 1.1 * max(roof, *(float(r[unit]) for r in rows)))
        first = rows[0]
        figure.suptitle(
            f"{op}, {first['dtype']}, {first['machine']}\n{first['date']}, commit {first['commit']}, "
            f"torch {first['torch']}; bars: median, lines: p10 to p90",
            fontsize=9,
        )
        figure.legend(loc="outside lower center", ncols=min(len(peers), 6), fontsize=8, frameon=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        all_of_it = max((r["pass"] for r in timed if r["op"] == op), key=len)  # forward+backward, where there is one
        part = "" if which == all_of_it else f"-{which}"
        image = path.with_name(f"{path.stem}-{op}{part}.png")
        figure.savefig(image, dpi=150)
        pyplot.close(figure)
        images.append(image)
    return images


def plot_memory(path: str | pathlib.Path) -> list[pathlib.Path]:
    """Draw peak memory beyond the gradients against time for every op that has cases at several budgets: one panel a
    case, riftco's budgets joined by a line, each peer a point. Returns the PNG files, written beside the CSV."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = pathlib.Path(path)
    timed = [r for r in read(path) if r["median_ms"] and r["pass"] != "forward" and r.get("grad_bytes")]
    images = []
    for op in dict.fromkeys(r["op"] for r in timed if BUDGET.fullmatch(r["case"])):
        rows = [(BUDGET.fullmatch(r["case"]), r) for r in timed if r["op"] == op]
        names = list(dict.fromkeys(m["case"] for m, _ in rows if m))
        wide = min(3, len(names))
        high = -(-len(names) // wide)
        figure, axes = pyplot.subplots(high, wide, figsize=(4.2 * wide, 3.2 * high), squeeze=False)
        for spare in axes.flat[len(names) :]:
            spare.set_visible(False)
        for panel, name in zip(axes.flat, names):
            mine = sorted(((int(m["mib"]), r) for m, r in rows if m and m["case"] == name), key=lambda pair: pair[0])
            at = [(_extra_mib(r), float(r["median_ms"])) for _, r in mine]
            panel.plot(*zip(*at), "o-", color=OURS, label="riftco")
            for (mib, _), point in zip(mine, at):
                panel.annotate(f"{mib}", point, xytext=(3, 4), textcoords="offset points", fontsize=7)
            for r in (r for m, r in rows if not m and r["case"] == name and r["peer"] != "riftco"):
                panel.plot(_extra_mib(r), float(r["median_ms"]), "s", label=r["peer"])
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.margins(y=0.12)
            panel.set_ylim(bottom=0)
            panel.set_title(f"{name}\n{mine[0][1]['shape']}", fontsize=8)
            panel.set_xlabel("peak MiB beyond the gradients", fontsize=7)
            panel.set_ylabel("ms, forward + backward", fontsize=7)
            panel.tick_params(labelsize=7)
            panel.legend(fontsize=6, loc="lower left")
            panel.spines[["top", "right"]].set_visible(False)
        first = rows[0][1]
        figure.suptitle(
            f"{op}, {first['dtype']}, {first['machine']}, {first['date']}, commit {first['commit']}, "
            f"torch {first['torch']}; numbers: budgets in MiB",
            fontsize=8,
        )
        figure.tight_layout()
        image = path.with_name(f"{path.stem}-{op}-memory.png")
        figure.savefig(image, dpi=150)
        pyplot.close(figure)
        images.append(image)
    return images


def _extra_mib(row: dict[str, str]) -> float:
    return max(int(row["peak_bytes"]) - int(row["grad_bytes"]), 1 << 16) / 2**20  # more than 0, for the logarithm
