"""Estimates how long a suite takes before it is run: cases and seconds by class, on the GPU of a profile.

The cost of a case besides its samples - operands, reference, check, profiler, capture - was fitted to the wall clock of
2431 rows on an H200 with a 16-core host (METHOD 1, policy "standard"; 91 s for 94 s measured). It differs by host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.attention_dropout import plain
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.suites import SuiteCase
from flopcast.roofline.stream.lowering.describe import describe

SETUP_SECONDS = {"gemm": 0.013, "attention": 0.068}  # attention is checked against a reference in blocks
SETUP_OTHERS = 0.016
SECONDS_PER_BYTE = 5.2e-12  # random operands and a reference in double precision
SECONDS_PER_FLOP = 3.6e-14  # of a product: its reference in fp32
SAMPLES = 16  # the mean of rows, most of 10, some of 100
SAMPLE_SECONDS, TIMEOUT_SECONDS, TIMEOUT_SAMPLES = 1e-3, 0.25, 3  # as TimingPolicy has them
# Host calibration, ceilings and warm-ups of a bench, besides its cases.
FIXED_SECONDS = 36.0


@dataclass(frozen=True)
class ClassDuration:
    """How many cases of one class a suite has, how many of them are held out, and the seconds that measuring takes."""

    op_class: str
    cases: int
    held_out: int
    seconds: float


def durations(cases: Sequence[SuiteCase], profile: Profile) -> list[ClassDuration]:
    """The durations by class, the longest first."""
    works = [describe(case.shape) for case in cases]
    times = profile.estimate([(plain(work), case.backend, case.cache) for work, case in zip(works, cases, strict=True)])
    found: dict[str, list[tuple[SuiteCase, float]]] = defaultdict(list)
    for case, work, time in zip(cases, works, times, strict=True):
        found[work.op_class].append((case, case_seconds(case, work.op_class, time.seconds)))
    return sorted(
        (
            ClassDuration(name, len(rows), sum(case.role == "holdout" for case, _ in rows), sum(s for _, s in rows))
            for name, rows in found.items()
        ),
        key=lambda found: -found.seconds,
    )


def case_seconds(case: SuiteCase, op_class: str, kernel_seconds: float) -> float:
    """Wall seconds of one case whose kernel takes `kernel_seconds`."""
    sample = max(SAMPLE_SECONDS, kernel_seconds)
    timed = min(SAMPLES * sample, max(TIMEOUT_SECONDS, TIMEOUT_SAMPLES * sample))
    checked = case.shape.flops * SECONDS_PER_FLOP if isinstance(case.shape, Gemm) else 0.0
    return SETUP_SECONDS.get(op_class, SETUP_OTHERS) + timed + checked + case.shape.bytes * SECONDS_PER_BYTE


def describe_duration(name: str, found: Sequence[ClassDuration], gpu: str) -> str:
    """One line: what the suite holds and how long it takes."""
    parts = ", ".join(f"{s.op_class} {s.cases} ({s.held_out} held out) {s.seconds:.0f} s" for s in found)
    count, total = sum(s.cases for s in found), sum(s.seconds for s in found)
    return f"{name}: {count} cases, about {total:.0f} s on {gpu} and {FIXED_SECONDS:.0f} s besides them; {parts}"
