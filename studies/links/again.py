"""Judges the shipped link by collectives that two other H200s ran on another day, to which nothing of it was fitted.

    python -m studies.links.again [--out reports/nvidia-h200/links/again.md]

The rows are of `flopcast bench --suite collectives` with the same NCCL (reports/nvidia-h200/links/second).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast

from flopcast.roofline.gpu.links.choice import Kind
from flopcast.roofline.gpu.links.library import find_interconnect
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table

FILE = ROOT / "reports" / "nvidia-h200" / "links" / "second" / "measurements.jsonl.gz"
LINK = "nvidia-h200"
LARGE = 2**20  # bytes; below, a collective takes its latency


@dataclass(frozen=True)
class Judged:
    """A collective of so many bytes: seconds as measured on the other day, and as the shipped link says."""

    kind: Kind
    dtype: str
    bytes: int
    measured: float
    forecast: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def judged(path: Path = FILE) -> list[Judged]:
    link = find_interconnect(LINK)
    found: list[Judged] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            key: list[str] = row["key"].split("/")
            if key[0] == "collective" and row["status"] == "ok" and row["seconds"]:
                kind, dtype = cast(Kind, key[1]), key[2]
                seconds = link.time(kind, row["bytes"], row["gpus"], row["nodes"], dtype).seconds
                found.append(Judged(kind, dtype, row["bytes"], row["seconds"], seconds))
    return found


def page(found: Sequence[Judged]) -> str:
    rows = []
    for name, some in (
        ("from 1 MiB on", [one for one in found if one.bytes >= LARGE]),
        ("below 1 MiB", [one for one in found if one.bytes < LARGE]),
    ):
        groups = defaultdict[str, list[float]](list)
        for one in some:
            groups[one.kind].append(abs(one.error))
            groups["all"].append(abs(one.error))
        for kind, errors in sorted(groups.items(), key=lambda item: item[0] == "all"):
            errors.sort()
            rows.append([
                name, kind, str(len(errors)), f"{median(errors):.1%}", f"{errors[int(0.9 * len(errors))]:.1%}",
                f"{errors[-1]:.1%}",
            ])  # fmt: skip
    return "\n".join([
        "# Collectives of two other H200s, on another day", "",
        "`python -m studies.links.again`. 24 November 2026, the same NCCL 2.28.9, NVLS off; the shipped link is of the",
        "day before. Errors are absolute, of what the link says over what was measured.", "",
        table(["size", "collective", "rows", "median", "90%", "worst"], rows), "",
    ])  # fmt: skip


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    text = page(judged())
    if out is not None:
        out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
