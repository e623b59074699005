"""Fits the paces of the plain Triton attention to causal calls on H200s, and judges them by another card's.

    python -m studies.shipped.attention_bands reports/nvidia-h200 [--out bands.md] [--write]

Before Hopper had kernels of its own, its attention ran on the plain ones with the tiles that windows run on today:
`FIT` and `JUDGE` are the folders of rows from then (bf16, head_dim 128). Judged by shapes that no fitted row has, and
by rows of windows and documents (`flopcast bench --suite bands`), to which nothing is fitted. `--write` replaces the
shipped parameters; the deviation is that of windows and documents.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from flopcast.kernels.attention_blocks import is_banded
from flopcast.kernels.shapes import Attention, shape_from_json
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.library.attention_band import (
    FILE,
    Fitted,
    Pace,
    Part,
    Reading,
    kernel_seconds,
    part_of,
    reading_seconds,
    seconds,
)
from flopcast.roofline.gpu.library.profiles import find_profile
from studies.fitting import fit_parser, hand_over
from studies.markdown import table

GPU = "nvidia-h200"
FIT = ("measurements/gpu0", "measurements/gpu1", "measurements/gpu2/run0")
JUDGE = ("measurements/gpu2/run1",)
NAMES = {"forward": "forward_kernel", "dkdv": "dkdv_kernel", "dq": "dq_kernel"}
READING = "delta_kernel"


@dataclass(frozen=True)
class Row:
    """A call: its seconds, and those of its kernels by name."""

    shape: Attention
    seconds: float
    kernels: dict[str, float]


def main() -> None:
    options = fit_parser(__spec__, __doc__, "folder of the cards' measurements", FILE).parse_args()
    part = part_of(find_profile(GPU), "bf16")
    assert part is not None
    fit, judge = (rows_of(options.folder, cards) for cards in (FIT, JUDGE))
    fit, judge = ([row for row in rows if not is_banded(row.shape)] for rows in (fit, judge))
    banded = [row for row in rows_of(options.folder, cards_in(options.folder)) if is_banded(row.shape)]
    known_shapes = {row.shape for row in fit}
    judge = [row for row in judge if row.shape not in known_shapes]
    known = fitted_paces(fit, part)
    errors = [math.log(seconds(row.shape, part, known) / row.seconds) for row in banded]
    sigma = float(np.sqrt(np.mean(np.square(errors))))
    source = (
        f"{len(fit)} causal calls of {len(known_shapes)} shapes; deviation of {len(banded)} with windows or documents"
    )
    known = Fitted(gpu=GPU, paces=known.paces, reading=known.reading, sigma=sigma, source=source)
    parts = {"Fitted": fit, "Judged": judge, "Windows and documents": banded}
    hand_over(report(parts, part, known), known, FILE, options)


def cards_in(folder: Path) -> list[str]:
    return sorted(str(file.parent.relative_to(folder)) for file in folder.rglob("measurements.jsonl.gz"))


def rows_of(folder: Path, cards: Sequence[str]) -> list[Row]:
    found = []
    for card in cards:
        with gzip.open(folder / card / "measurements.jsonl.gz", "rt") as lines:
            for row in map(json.loads, lines):
                kind = (row.get("shape") or {}).get("kind"), row.get("backend"), row.get("status")
                if kind == ("attention", "triton", "ok"):
                    shape = shape_from_json(row["shape"])
                    assert isinstance(shape, Attention)
                    found.append(Row(shape, row["seconds"], dict(row["kernels"] or ())))
    return found


def fitted_paces(rows: Sequence[Row], part: Part) -> Fitted:
    """The paces of least log residuals, of each kernel by itself: of the forward by calls, which are one kernel."""
    paces = {}
    for kernel, name in NAMES.items():
        mine = [
            (row.shape, row.seconds if kernel == "forward" else row.kernels[name])
            for row in rows
            if (row.shape.direction == "fwd") == (kernel == "forward")
        ]

        def residuals(logs: Array, /, mine: Sequence[tuple[Attention, float]] = mine, kernel: str = kernel) -> Array:
            pace = Pace(*map(math.exp, logs))
            return np.log([kernel_seconds(kernel, shape, part, pace) / taken for shape, taken in mine])

        begin = np.log([0.5, 2e-6])
        share, start = np.exp(least_squares(residuals, begin, diff_step=[1e-3]).x)
        paces[kernel] = Pace(float(share), float(start))
    read = [(row.shape, row.kernels[READING]) for row in rows if READING in row.kernels]

    def of_reading(logs: Array, /) -> Array:
        reading = Reading(*map(math.exp, logs))
        return np.log([reading_seconds(shape, part, reading) / taken for shape, taken in read])

    floor, share = np.exp(least_squares(of_reading, np.log([3e-6, 0.9])).x)
    return Fitted(gpu=GPU, paces=paces, reading=Reading(float(floor), float(share)), sigma=0.0, source="")


def report(parts: Mapping[str, Sequence[Row]], part: Part, known: Fitted) -> str:
    head = ["call", "measured, us", "forecast, us", "error"]
    told = "Causal calls on the plain Triton attention, bf16, medians. `python -m studies.shipped.attention_bands`."
    shown = ["# Paces of the plain attention", "", told]
    for name, rows in parts.items():
        once = {row.shape: row for row in rows}
        shown += ["", f"## {name}", "", table(head, [_line(row, part, known) for row in once.values()])]
    values = [[kernel, f"{one.share:.3f}", f"{one.start * 1e6:.2f} us"] for kernel, one in known.paces.items()]
    values.append(["reading", f"{known.reading.share:.3f}", f"{known.reading.floor * 1e6:.2f} us"])
    values.append(["deviation", f"{known.sigma:.3f}", ""])
    return "\n".join([*shown, "", "## Parameters", "", table(["kernel", "share", "start"], values)])


def _line(row: Row, part: Part, known: Fitted) -> list[str]:
    found = seconds(row.shape, part, known)
    return [row.shape.key, f"{row.seconds * 1e6:.1f}", f"{found * 1e6:.1f}", f"{found / row.seconds - 1.0:+.1%}"]


if __name__ == "__main__":
    main()
