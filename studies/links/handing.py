"""Measures what torch's DataLoader adds to loading: handing a batch from a worker to the loop, and pinning it.

    python -m studies.links.handing OUT      measures on a GPU's host and writes OUT/handing.json
    python -m studies.links.handing          prints the lines by the committed file

Samples are there at once and no step runs, so that a batch takes what putting it together, sharing it, pinning it or
copying it takes, whichever is the longest. `roofline.step.questions.input_pipeline.HANDING` has these lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from studies.command import parser_of
from studies.imports import ROOT
from studies.links.fed import PREFETCHED
from studies.links.feeding import Batch, Loaded

Floats = NDArray[np.float64]

FILE = ROOT / "reports" / "nvidia-h200" / "input" / "handing.json"
SAMPLE_BYTES = 602_112  # of an image of 224 x 224 in fp32
SAMPLES = (16, 64, 256)  # of a batch: 9.6 to 154 MB
ENOUGH = 8  # workers that put batches together faster than one process takes them
ROUNDS, ROUND_SECONDS = 5, 0.5


@dataclass(frozen=True)
class Way:
    """How batches reach the loop, which copies each to the GPU or does nothing with it."""

    name: str
    workers: int = 0
    is_pinned: bool = False
    is_copied: bool = False


TOGETHER = Way("put together")
PINNED = Way("put together and pinned", is_pinned=True)
SHARED = Way("put together by a worker", workers=1)
FETCHED = Way("pinned from workers", workers=ENOUGH, is_pinned=True)
COPIED = Way("copied from workers", workers=ENOUGH, is_copied=True)
READY = Way("put together and copied", is_copied=True)
WAYS = (TOGETHER, PINNED, SHARED, FETCHED, COPIED, READY)


@dataclass(frozen=True)
class Measured:
    """Seconds of a batch of so many bytes, in each round."""

    way: str
    bytes: int
    seconds: list[float]


def measured(way: Way, samples: int) -> Measured:
    sample = {"pixels": torch.zeros(SAMPLE_BYTES // 4)}
    loader = DataLoader(Loaded(sample, 0.0), batch_size=samples, num_workers=way.workers, pin_memory=way.is_pinned)
    batches: Iterator[Batch] = iter(loader)

    def run(count: int) -> float:
        start = time.perf_counter()
        for batch in islice(batches, count):
            if way.is_copied:
                batch["pixels"].to("cuda")
        return (time.perf_counter() - start) / count

    first = run((PREFETCHED + 1) * max(way.workers, 1))
    count = max(int(ROUND_SECONDS / first / max(way.workers, 1)), 1) * max(way.workers, 1)
    return Measured(way.name, samples * SAMPLE_BYTES, [run(count) for _ in range(ROUNDS)])


def lines(rows: Sequence[Measured]) -> dict[str, tuple[float, float]]:
    """(seconds of a batch, seconds per byte) of each field of `Handing`: the line with the least squares of relative
    errors at the sizes measured."""
    by_way = {way: np.array([median(row.seconds) for row in rows if row.way == way.name]) for way in WAYS}
    sizes = np.array([row.bytes for row in rows if row.way == TOGETHER.name])
    extra = {
        "shared": by_way[SHARED] - by_way[TOGETHER],
        "pinned": by_way[PINNED] - by_way[TOGETHER],
        "pinned_from_workers": by_way[FETCHED],
        "copied_from_workers": by_way[COPIED] - (by_way[READY] - by_way[TOGETHER]),
    }
    return {name: _line(sizes, seconds) for name, seconds in extra.items()}


def _line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    fixed, each = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)))[0]
    return (0.0, float(np.mean(seconds / sizes))) if fixed < 0 else (float(fixed), float(each))


def read(path: Path = FILE) -> list[Measured]:
    return [Measured(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    out = parser.parse_args().out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        rows: list[Measured] = []
        for samples in SAMPLES:
            for way in WAYS:
                rows.append(measured(way, samples))
                print(f"{way.name}, {samples}: {median(rows[-1].seconds) * 1e3:.2f} ms", flush=True)
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        (out / FILE.name).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for name, (fixed, each) in lines(read(FILE if out is None else out / FILE.name)).items():
        print(f"{name}: {fixed * 1e3:.2f} ms and {1e-9 / each:.2f} GB/s")


if __name__ == "__main__":
    main()
