"""Judges the shipped link of H200s by collectives that others and H100s ran, and what two H200s say of four.

    python -m studies.links.again [--out reports/nvidia-h200/links/again.md]

The rows are of `flopcast bench --suite collectives`, the same NCCL, NVLS off (reports/nvidia-h200/links, its folders
`second` and `four`, reports/nvidia-h100-sxm/links). Of two GPUs the shipped link has the first host's, of four those
of `four`: what two say of four is judged by the link without them.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import cast

from flopcast.roofline.gpu.links.choice import Kind
from flopcast.roofline.gpu.links.library import Interconnect, find_interconnect, interconnect_of
from studies.command import parser_of
from studies.links.shipped import FOLDER, FOUR, H100, by_two
from studies.markdown import table

FILE = FOLDER / "second" / "measurements.jsonl.gz"
OF_FOUR, OF_H100 = FOUR / "measurements.jsonl.gz", H100 / "measurements.jsonl.gz"
LINK = "nvidia-h200"
LARGE = 2**20  # bytes; below, a collective takes its latency


@dataclass(frozen=True)
class Judged:
    """A collective of so many bytes: seconds as measured, and as a link says with the ends of its 90% interval."""

    kind: Kind
    dtype: str
    bytes: int
    measured: float
    forecast: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1

    @property
    def is_within(self) -> bool:
        return self.low <= self.measured <= self.high


def judged(path: Path = FILE, gpus: int = 2, link: Interconnect | None = None) -> list[Judged]:
    """The collectives among `gpus` in a file of rows. `link`: by default the shipped one."""
    link = link or find_interconnect(LINK)
    found: list[Judged] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            key: list[str] = row["key"].split("/")
            if key[0] == "collective" and row["status"] == "ok" and row["seconds"] and row["gpus"] == gpus:
                kind, dtype = cast(Kind, key[1]), key[2]
                said = link.time(kind, row["bytes"], row["gpus"], row["nodes"], dtype)
                found.append(Judged(kind, dtype, row["bytes"], row["seconds"], said.seconds, said.low, said.high))
    return found


def judged_by_two() -> list[Judged]:
    """The collectives among four by the link as two GPUs alone tell it, without NVLS, as four ran."""
    return judged(OF_FOUR, 4, replace(interconnect_of(by_two()), nvls=False))


def page() -> str:
    columns = ["size", "collective", "rows", "median", "90%", "worst", "inside 90%"]
    return "\n".join([
        "# Collectives of other H200s", "",
        "`python -m studies.links.again`. NCCL 2.28.9, NVLS off. Errors are absolute, of what the link says over what",
        "was measured.", "",
        "## Two others, on 24 November 2026, a day after the shipped link's two", "",
        table(columns, summary(judged())), "",
        "## Two of another host's four, on 26 November 2026", "",
        table(columns, summary(judged(OF_FOUR))), "",
        "## H100s, by what H200s say", "",
        "Two and four H100s of one host, on 26 November 2026, over NVLink of the same rate. What ships for H100s is",
        "measured.", "",
        "Two:", "", table(columns, summary(judged(OF_H100))), "",
        "Four:", "", table(columns, summary(judged(OF_H100, 4))), "",
        "## Four, by what two alone said", "",
        "The law bent by half of how far it is off for two. The shipped link has these times as measured.", "",
        table(columns, summary(judged_by_two())), "",
    ])  # fmt: skip


def summary(found: Sequence[Judged]) -> list[list[str]]:
    rows = []
    for name, some in (
        ("from 1 MiB on", [one for one in found if one.bytes >= LARGE]),
        ("below 1 MiB", [one for one in found if one.bytes < LARGE]),
    ):
        groups = defaultdict[str, list[Judged]](list)
        for one in some:
            groups[one.kind].append(one)
            groups["all"].append(one)
        for kind, members in sorted(groups.items(), key=lambda item: item[0] == "all"):
            errors = sorted(abs(one.error) for one in members)
            rows.append([
                name, kind, str(len(errors)), f"{median(errors):.1%}", f"{errors[int(0.9 * len(errors))]:.1%}",
                f"{errors[-1]:.1%}", f"{sum(one.is_within for one in members)}",
            ])  # fmt: skip
    return rows


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    text = page()
    if out is not None:
        out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
