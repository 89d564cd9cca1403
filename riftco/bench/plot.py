"""Bar charts from a bench CSV: one figure an op, peers side by side under the measured roof of the machine."""

from __future__ import annotations

import csv
import pathlib

ROOFS = {"tflop_s": ("TFLOP/s", "roof_matmul_tflop_s", "matmul"), "gb_s": ("GB/s", "roof_copy_gb_s", "copy")}


def read(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def unit_of(rows: list[dict[str, str]]) -> str:
    """The rate whose roof is the nearer one for most of the rows: what bounds the op."""
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
    timed = [r for r in read(path) if r["tflop_s"]]
    images = []
    for op in dict.fromkeys(r["op"] for r in timed):
        rows = [r for r in timed if r["op"] == op]
        unit = unit_of(rows)
        label, roof_column, roof_name = ROOFS[unit]
        labels = list(dict.fromkeys(f"{r['case']}\n{r['shape']}" for r in rows))
        peers = list(dict.fromkeys(r["peer"] for r in rows))
        width = 0.8 / len(peers)
        figure, axes = pyplot.subplots(figsize=(max(6.0, 1.0 + len(labels) * len(peers) * 0.45), 4.5))
        for i, peer in enumerate(peers):
            mine = [r for r in rows if r["peer"] == peer]
            at = [labels.index(f"{r['case']}\n{r['shape']}") + (i - (len(peers) - 1) / 2) * width for r in mine]
            rates = [float(r[unit]) for r in mine]
            slow = [rate * (1 - float(r["median_ms"]) / float(r["p90_ms"])) for rate, r in zip(rates, mine)]
            fast = [rate * (float(r["median_ms"]) / float(r["p10_ms"]) - 1) for rate, r in zip(rates, mine)]
            axes.bar(at, rates, width * 0.92, label=peer, yerr=[slow, fast], error_kw={"elinewidth": 0.8})
        roof = float(rows[0][roof_column])
        axes.axhline(roof, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"measured {roof_name}: {roof:.4g} {label}", (0, roof), xycoords=("axes fraction", "data"),
            xytext=(4, 3), textcoords="offset points", fontsize=8,
        )  # fmt: skip
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylabel(f"{label}, {rows[0]['pass']}")
        axes.set_ylim(0, 1.15 * max(roof, *(float(r[unit]) for r in rows)))
        first = rows[0]
        axes.set_title(
            f"{op}, {first['dtype']}, {first['machine']}\n{first['date']}, commit {first['commit']}, "
            f"torch {first['torch']}; bars: median, lines: p10 to p90",
            fontsize=8,
        )
        axes.legend(fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        image = path.with_name(f"{path.stem}-{op}.png")
        figure.savefig(image, dpi=150)
        pyplot.close(figure)
        images.append(image)
    return images
