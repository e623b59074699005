"""Where each millisecond of a step went: a table and a figure of what `studies.kernels.steps` measured.

    python -m studies.kernels.where OUT          reads OUT/steps.csv, writes OUT/steps.md and OUT/steps.png

A step's bar is the time of its kernels by class, and what is left of its median time in which no kernel ran: the host,
gaps between kernels, waits. In captured and compiled steps kernels can overlap, so that the sum may exceed the step.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from studies.command import parser_of

CLASSES = (
    "products", "attention", "optimizer", "compiled", "norms, rope, activation", "loss", "copies", "reductions",
    "others",
)  # fmt: skip
IDLE = "no kernel"
MODES = ("eager", "compile", "compile-graphs")


def parts(row: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds of a step by class, and those in which no kernel ran."""
    found = {name: pair[0] for name, pair in json.loads(row["by_class"]).items()}
    return {**found, IDLE: max(0.0, 1e3 * float(row["median_seconds"]) - float(row["kernel_ms"]))}


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table: per case and mode both contenders' medians, their ratio, and kernels' times by class."""
    shown = [name for name in CLASSES if any(name in json.loads(row["by_class"]) for row in rows)]
    lines = [
        "| step | mode | whose | ms | ours / torch's | kernels, ms | launches | " + " | ".join(shown) + " |",
        "|---" * (7 + len(shown)) + "|",
    ]
    torchs = {key_of(row): row for row in rows if row["contender"] == "torch"}
    for row in sorted(rows, key=lambda x: (*key_of(x)[:4], MODES.index(x["mode"]), x["contender"] != "torch")):
        other = torchs.get(key_of(row))
        is_ours = row["contender"] == "ours"
        ratio = f"{float(row['median_seconds']) / float(other['median_seconds']):.2f}" if other and is_ours else ""
        by_class = parts(row)
        times = " | ".join(f"{by_class[name]:.2f}" if name in by_class else "" for name in shown)
        lines.append(
            f"| {row['config']}, {row['layers']} layers, {row['batch']} x {row['seq']} | {row['mode']} | "
            f"{row['contender']} | {1e3 * float(row['median_seconds']):.2f} | {ratio} | "
            f"{float(row['kernel_ms']):.2f} | {row['kernels']} | {times} |"
        )
    return "\n".join(lines) + "\n"


def key_of(row: Mapping[str, str]) -> tuple[str, str, int, int, int]:
    return row["config"], row["mode"], int(row["layers"]), int(row["batch"]), int(row["seq"])


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Stacked bars, torch's and ours of a step and mode beside one another."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = sorted({(row["config"], int(row["batch"]), int(row["seq"])) for row in rows})
    figure, axes = plt.subplots(1, len(cases), figsize=(3.6 * len(cases) + 1.5, 4.2), squeeze=False)
    colours = plt.get_cmap("tab10")
    for axis, (config, batch, seq) in zip(axes[0], cases, strict=True):
        of_case = [x for x in rows if (x["config"], int(x["batch"]), int(x["seq"])) == (config, batch, seq)]
        of_case.sort(key=lambda x: (MODES.index(x["mode"]), x["contender"] != "torch"))
        for place, row in enumerate(of_case):
            bottom = 0.0
            by_class = parts(row)
            for index, name in enumerate((*CLASSES, IDLE)):
                height = by_class.get(name, 0.0)
                colour = "lightgray" if name == IDLE else colours(index % 10)
                axis.bar(place, height, 0.8, bottom, color=colour, label=name if place == 0 else None)
                bottom += height
            axis.text(place, bottom, f"{1e3 * float(row['median_seconds']):.1f}", ha="center", va="bottom", fontsize=7)
        names = [f"{x['contender']}, {x['mode']}, {x['layers']} layers" for x in of_case]
        axis.set_xticks(range(len(of_case)), names, fontsize=7, rotation=50, ha="right")
        axis.set_title(f"{config}, {batch} x {seq}", fontsize=9)
    axes[0][0].set_ylabel("ms per step")
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    with (options.out / "steps.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["by_class"]]
    (options.out / "steps.md").write_text(table(rows), encoding="utf-8")
    draw(rows, options.out / "steps.png")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
