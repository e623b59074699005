"""The gap between our products and cuBLAS's at random shapes, by layout and by size: a table and a figure.

    python -m studies.kernels.gap reports/nvidia-h200/matmul-kernels/random.csv [--plot FILE.png]

The rows are those of `python -m studies.kernels.pairs OUT --only matmul --drawn 64,8`. Above 1 ours is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from studies.command import parser_of
from studies.kernels.pairs import Row, geometric_mean, read_rows
from studies.markdown import table

SIZES = ((0.0, "below 10 GFLOP"), (1e10, "10 to 100"), (1e11, "100 to 1,000"), (1e12, "from 1 TFLOP on"))
LAYOUTS = ("nt", "nn", "tn")
STARTS = ("rows at whole sectors", "A's or B's rows within sectors", "both within sectors")
SECTOR = 16  # elements of 32 bytes
COLUMNS = ("multiples of", "of", "shapes", "geometric mean", "10th percentile", "least")


def multiple_of(row: Row) -> str:
    return "64" if all(int(row[name]) % 64 == 0 for name in "mnk") else "8"


def size_of(row: Row) -> str:
    return next(label for start, label in reversed(SIZES) if float(row["flops"]) >= start)


def starts_of(row: Row) -> str:
    """Of how many operands rows begin within a sector of 32 bytes."""
    m, n, k = (int(row[name]) for name in "mnk")
    of_a, of_b = {"nt": (k, k), "nn": (k, n), "tn": (m, n)}[row["layout"]]
    return STARTS[(of_a % SECTOR != 0) + (of_b % SECTOR != 0)]


def timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kernel"] == "matmul" and row["status"] == "ok"]


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Cells of COLUMNS: of each multiple all shapes, then by layout, by FLOPs of a product and by where rows begin."""
    for multiple in ("64", "8"):
        mine = [row for row in timed(rows) if multiple_of(row) == multiple]
        parts = {"all": mine}
        parts |= {layout: [row for row in mine if row["layout"] == layout] for layout in LAYOUTS}
        parts |= {label: [row for row in mine if size_of(row) == label] for _, label in SIZES}
        parts |= {label: [row for row in mine if starts_of(row) == label] for label in STARTS if multiple == "8"}
        for label, some in parts.items():
            if ratios := sorted(float(row["ratio"]) for row in some):
                tenth = ratios[len(ratios) // 10]
                cells = (f"{len(ratios)}", f"{geometric_mean(ratios):.3f}", f"{tenth:.2f}", f"{ratios[0]:.2f}")
                yield [multiple, label, *cells]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Ratios against FLOPs, a panel a layout."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(LAYOUTS), figsize=(13.0, 4.2), sharey=True)
    for axis, layout in zip(axes, LAYOUTS, strict=True):
        for multiple in ("64", "8"):
            some = [row for row in timed(rows) if row["layout"] == layout and multiple_of(row) == multiple]
            if not some:
                continue
            ratios = [float(row["ratio"]) for row in some]
            label = f"multiples of {multiple}: {geometric_mean(ratios):.2f}"
            axis.scatter([float(row["flops"]) for row in some], ratios, s=12, alpha=0.8, label=label)
        axis.axhline(1.0, color="0.4", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("FLOPs a product")
        axis.set_title(layout)
        axis.legend(title="geometric mean", fontsize=8)
    axes[0].set_ylabel("cuBLAS's time / ours")
    figure.suptitle("Random shapes that no table has")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    print(table(COLUMNS, lines(rows)))
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
