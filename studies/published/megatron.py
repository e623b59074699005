"""Megatron-LM's GPTs under tensor parallel on one host of A100s, by the step of `megatron_step`.

`judged`: V. Korthikanti and others, Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198):
the 22B model on a DGX of 8 A100s of 80 GB, tensor parallel over all eight, 4 sequences of 2048 tokens in one
micro-batch. Table 5 has the step with every layer computed again, and that with sequence parallel and attention alone
computed again; table 4 what a layer's forward and backward take, in five ways.

`judged_rows`: rows of VIA-Research/vTrain's data/ground_truth_single.csv under tensor parallel alone, which are not
steps that ran. `departure` finds them linear in the number of micro-batches and of layers to the last digit, and where
data parallel is added they are longer by what that repository's table of all-reduces has, to the nanosecond. They are
sums: what one layer took under a profiler, with the gaps that its host left between kernels, and all-reduces measured
by themselves, two forward and two backward. No layer is computed again in them: products would have to run at 294 of
the 312 TFLOPS of the part where one GPU has all of a layer (2048 wide, 4 sequences, 8.78 ms). Where gaps make up a row
nothing can be read from it of a forecast.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.model.run import Run
from studies.published.judged import Judged
from studies.published.megatron_step import Recompute, make_layers, make_step

GPU, SUMS = "nvidia-a100-80gb-sxm", "training_steps_a100_single_node.csv"
HIDDEN, LAYERS, HEADS, RANKS, BATCH, SEQ, VOCABULARY = 6144, 48, 64, 8, 4, 2048, 51200  # the 22B model
TRACED_LAYERS = 8  # of the times of one layer
MICRO = 4


@dataclass(frozen=True)
class Row:
    """`milliseconds`: of the step, or of a layer."""

    recompute: Recompute
    sequence_parallel: bool
    milliseconds: float

    @property
    def name(self) -> str:
        also = ", sequence parallel" if self.sequence_parallel else ""
        return f"Megatron-LM 22B, {RANKS} A100, {BATCH} x {SEQ}, recompute {self.recompute}{also}"


STEPS = (Row("full", False, 1420.0), Row("selective", True, 1100.0))
LAYER_TIMES = (
    Row("none", False, 19.6), Row("none", True, 19.0), Row("full", False, 27.2), Row("selective", False, 20.9),
    Row("selective", True, 20.3),
)  # fmt: skip


def judged() -> Iterator[Judged]:
    for row in STEPS:
        sizes = (HIDDEN, LAYERS, HEADS, RANKS, BATCH, BATCH, SEQ, VOCABULARY)
        found = _forecast(partial(make_step, *sizes, row.recompute, row.sequence_parallel), RANKS)
        yield Judged("tensor parallel on one host of 8 A100s", row.name, row.milliseconds / 1e3, found, is_told=True)
    yield from judged_layers()


def judged_layers() -> Iterator[Judged]:
    """What a layer's forward and backward take, in five ways."""
    for row in LAYER_TIMES:
        alone = (HIDDEN, TRACED_LAYERS, HEADS, RANKS, BATCH, SEQ)
        found = _forecast(partial(make_layers, *alone, row.recompute, row.sequence_parallel), RANKS)
        seconds = TRACED_LAYERS * row.milliseconds / 1e3
        yield Judged(
            "layers' forward and backward under tensor parallel", f"{row.name}, layers", seconds, found, is_told=True
        )


def _forecast(make: Callable[[], Callable[[], None]], ranks: int) -> Forecast:
    run, profile = Run(parallel=f"own=1x{ranks}"), find_profile(GPU)
    stream = Module(make).stream(run, run.device_of(profile.device), profile.device)
    return PricedStep(stream, run_of_stream(stream, run), profile).forecast()


@dataclass(frozen=True)
class Sum:
    """A row of vTrain's table under tensor parallel alone."""

    hidden: int
    layers: int
    heads: int
    seqlen: int
    tp: int
    micro_batch: int
    global_batch: int
    milliseconds: float

    @property
    def micro_batches(self) -> int:
        return self.global_batch // self.micro_batch

    @property
    def name(self) -> str:
        return (
            f"vTrain's {self.layers} layers of {self.hidden}, {self.tp} A100, {self.micro_batch} of {self.global_batch}"
        )


def all_sums(folder: Path) -> list[Sum]:
    numbers = ("hidden", "layers", "heads", "seqlen", "tp", "micro_batch", "global_batch")
    with (folder / SUMS).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if int(row["tp"]) > 1 and row["dp"] == row["pp"] == "1"]
    return [Sum(milliseconds=float(row["latency_ms"]), **{name: int(row[name]) for name in numbers}) for row in rows]


def some_sums(folder: Path, most: int) -> list[Sum]:
    """Those of at most MICRO micro-batches, spread evenly."""
    found = [one for one in all_sums(folder) if one.micro_batches <= MICRO]
    step = max(len(found) / most, 1.0) if most else 1.0
    return [found[int(place * step)] for place in range(min(most, len(found)))]


def departure(sums: Iterable[Sum]) -> float:
    """By how many milliseconds rows depart at most from a straight line over micro-batches, or over layers."""
    lines: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for one in sums:
        alike = (one.hidden, one.heads, one.seqlen, one.tp, one.micro_batch)
        lines[(*alike, "layers", one.layers)][one.micro_batches] = one.milliseconds
        lines[(*alike, "micro-batches", one.micro_batches)][one.layers] = one.milliseconds
    return max(_bend(line) for line in lines.values())


def _bend(line: dict[int, float]) -> float:
    slopes = [(line[b] - line[a]) / (b - a) for a, b in pairwise(sorted(line))]
    return max((abs(slope - slopes[0]) for slope in slopes), default=0.0)


def judged_rows(folder: Path, most: int) -> Iterator[Judged]:
    for one in some_sums(folder, most):
        sizes = (one.hidden, one.layers, one.heads, one.tp, one.micro_batch, one.global_batch, one.seqlen)
        found = _forecast(partial(make_step, *sizes, recompute="none", overlapped=False), one.tp)
        yield Judged("sums of what a layer took under a profiler", one.name, one.milliseconds / 1e3, found)
