"""Draws what `spark_bench.py --json` wrote: thousand rows a second by system.

    python benchmarks/chart.py figures.json docs/images/spark.svg

The ending of the second name chooses the format. One group of bars for each line of the table; a
filter of 1 % is in another panel, for it is another scale.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

SYSTEMS = {
    "ours": ("SluiceMQ", "#1f6f8b"),
    "ceiling": ("a Python source with the rows in memory", "#b8b8b8"),
    "kafka": ("Kafka and Spark's connector", "#d98c3f"),
}
BAR = 0.26


def panel(axes: Any, lines: list[dict[str, Any]]) -> None:
    """Horizontal bars, the first line on top."""
    for place, line in enumerate(reversed(lines)):
        present = [name for name in SYSTEMS if name in line["numbers"]]
        for turn, name in enumerate(present):
            label, colour = SYSTEMS[name]
            value = line["numbers"][name]
            height = place + ((len(present) - 1) / 2 - turn) * BAR
            axes.barh(height, value, BAR * 0.92, color=colour, label=label)
            axes.text(value, height, f" {value:,.0f}", va="center", fontsize=7, color="#333333")
    axes.set_yticks(range(len(lines)), [line["title"] for line in reversed(lines)], fontsize=8)
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(figures: dict[str, Any], target: Path) -> None:
    rates = [line for line in figures["lines"] if not line["unit"]]
    plain = [line for line in rates if "1 %" not in line["title"]]
    filtered = [line for line in rates if "1 %" in line["title"]]
    parts = [part for part in (plain, filtered) if part]
    mpl.rcParams["svg.hashsalt"] = "spark"  # the same figures make the same file
    figure = Figure(figsize=(8, 1.2 + 0.62 * len(rates)), layout="constrained")
    grid = figure.add_gridspec(len(parts), 1, height_ratios=[len(part) for part in parts])
    for number, part in enumerate(parts):
        panel(figure.add_subplot(grid[number, 0]), part)
    figure.axes[-1].set_xlabel("thousand rows of the topic a second", fontsize=8)
    figure.suptitle(
        f"Spark {figures['spark']}, local[2], {figures['messages']:,} messages of 128 B", fontsize=9
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=7,
                  frameon=False)  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
