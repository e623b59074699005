"""The steps that H200s ran (`studies.parallel.steps`), without their kernels: times and memory, a rank a row.

python -m studies.parallel.measured OUT                puts what OUT holds into reports/parallel/steps.csv
python -m studies.parallel.measured OUT --again        into steps-again.csv, of steps that another host ran again
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from studies.command import parser_of
from studies.imports import ROOT
from studies.parallel.steps import ALL, MODELS, Measured, Step, load

FILE = ROOT / "reports" / "parallel" / "steps.csv"
AGAIN = FILE.with_name("steps-again.csv")
_SAME = ("rank", "ranks", "gpu", "torch", "nccl", "peak_bytes", "reserved_bytes", "used_bytes")
_LISTS = ("step_seconds", "host_seconds")  # of rounds, with spaces between


def write(found: Iterable[Measured], path: Path = FILE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *_SAME, *_LISTS])
        for one in found:
            lists = (" ".join(f"{seconds:.6f}" for seconds in getattr(one, name)) for name in _LISTS)
            rows.writerow([Step(**one.step).name, *(getattr(one, name) for name in _SAME), *lists])


def read(path: Path = FILE) -> dict[Step, list[Measured]]:
    """Returns the ranks of each step, in the order of ALL."""
    by_name: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            by_name[row["step"]].append(row)
    return {step: [_measured(step, row) for row in by_name[step.name]] for step in ALL if step.name in by_name}


def _measured(step: Step, row: dict[str, str]) -> Measured:
    step_seconds, host_seconds = ([float(text) for text in row[name].split()] for name in _LISTS)
    return Measured(
        step=asdict(step), config=MODELS[step.model], rank=int(row["rank"]), ranks=int(row["ranks"]), gpu=row["gpu"],
        torch=row["torch"], nccl=row["nccl"], step_seconds=step_seconds, host_seconds=host_seconds,
        peak_bytes=int(row["peak_bytes"]), reserved_bytes=int(row["reserved_bytes"]), used_bytes=int(row["used_bytes"]),
    )  # fmt: skip


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    out, file = options.out, AGAIN if options.again else FILE
    found = read(file) if file.is_file() else {}
    for step in ALL:
        if paths := sorted(out.glob(f"{step.name}.rank*.json.gz")):
            found[step] = [load(path) for path in paths]
    write((rank for step in ALL for rank in found.get(step, ())), file)


if __name__ == "__main__":
    main()
