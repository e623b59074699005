"""Compares recorded compiled steps with what their launches cost by the profile: device time by class, and memory.

    python -m studies.compiled.steps [--only qwen3-0.6b-l2,mlp] [--out steps.md]

A case's launches come from the code that inductor generated on the GPU, so that the table judges the laws of kernels
and of memory alone; `gate.py` judges the code that is generated without a GPU. Graphs are called as often and in the
order in which the profiler saw their kernels. Where products run between graphs, what is called there is that of
`outside`, which `make.py` recorded without a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from flopcast.errors import FlopcastError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.uncertainty import Moves
from flopcast.roofline.stream.compiled.launches import Kind
from flopcast.roofline.stream.compiled.profiled import Joined, class_of_kernel
from flopcast.roofline.stream.lowering.classes import group_of, op_class
from studies.command import parser_of
from studies.compiled import dropout, generated
from studies.compiled.record import CASES, Case
from studies.compiled.recorded import FOLDER, compiled_stream, joined, record_of, run_of
from studies.markdown import table

GPU = "nvidia-h200"
GROUPS = ("gemm", "attention", "generated", "optimizer", "reduction", "elementwise")
NOTES = """- Products, optimizer and memory come from the laws of eager steps, which no compiled step was fitted to.
- Attention is that of calls with masks, timed alone (`bench --suite masks`). Of Llama, Qwen3-1.7B and 4B it is low
  since their steps, two thirds products, run at a lower clock: the same call takes 214 us in Qwen3-0.6B's step and 230
  in 1.7B's.
- Qwen3-MoE's experts run eagerly between its graphs: 14.0 of its 18.6 ms. What is called there was recorded without a
  GPU, with as many tokens for each expert; in the step one of 32 had none.
- Peak memory of ResNet-50 and ViT is 84 MB low in both. Their graphs keep 320 and 270 results of many sizes."""
_CALLS = {
    Kind.PRODUCT: "gemm", Kind.CONVOLUTION: "gemm", Kind.ATTENTION: "attention", Kind.ATTENTION_BACKWARD: "attention",
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A compiled step: seconds of the device by group of classes, forecast and measured, the deviation of each group by
    the errors of its shapes, and peak memory in bytes, None where it was not recorded."""

    name: str
    forecast: dict[str, float]
    measured: dict[str, float]
    own_sigmas: Mapping[str, float]
    moves: Moves
    forecast_bytes: int
    measured_bytes: int | None

    @property
    def device_error(self) -> float:
        return sum(self.forecast.values()) / sum(self.measured.values()) - 1.0

    @property
    def is_within(self) -> bool:
        """Whether the measured device seconds lie in the 90% interval."""
        off = -log(1.0 + self.device_error)
        return -self.moves.down <= off <= self.moves.up

    @property
    def bytes_error(self) -> float | None:
        return None if self.measured_bytes is None else self.forecast_bytes / self.measured_bytes - 1.0


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--out", type=Path, help="file for the tables")
    options = parser.parse_args()
    wanted = options.only
    chosen = [case for case in CASES if wanted is None or case.name in wanted.split(",")]
    profile = find_profile(GPU)
    steps = []
    for case in chosen:
        try:
            steps.append(compared(case, profile))
        except FlopcastError as fault:
            print(f"{case.name}: {fault}")
    shown = report(steps)
    print(shown)
    if options.out:
        options.out.write_text(shown + "\n")


def report(steps: Sequence[Compared]) -> str:
    told = (
        "`python -m studies.compiled.steps`. Device time and peak memory of the step, errors of the forecast by group "
        'of kernels ("-1.0% of 22.98": forecast 1.0% under 22.98 ms measured); "in": whether the device time lies in '
        "the interval of 90%. The launches are those of the recorded code. Parts: what of the laws was fitted to "
        "kernels of that very step."
    )
    head = ["step", "parts fitted", "device, ms", "error", "in", *GROUPS, "peak memory, GB", "error"]
    lines = ["# Recorded compiled steps beside what their launches cost by the shipped laws", "", told, ""]
    lines += [table(head, [row_of(one) for one in steps]), ""]
    for name, some in (
        ("All", steps),
        ("Of which no kernel was fitted", [one for one in steps if not parts_fitted(one.name)]),
    ):
        if some:
            errors = sorted(abs(one.device_error) for one in some)
            within = sum(one.is_within for one in some)
            middle, worst = median(errors), errors[-1]
            lines.append(f"- {name}: {len(some)} steps, {middle:.1%} at the median, {worst:.1%} at worst, {within} in.")
    return "\n".join([*lines, "", NOTES])


def parts_fitted(name: str) -> list[str]:
    laws = {"generated": generated.FIT, "dropout": (dropout.FIT,)}
    return [law for law, cases in laws.items() if name in cases]


def row_of(one: Compared) -> list[str]:
    groups = [f"{_error(one.forecast.get(g, 0.0), one.measured.get(g, 0.0))}" for g in GROUPS]
    memory = "-" if one.measured_bytes is None else f"{one.measured_bytes / 1e9:.2f}"
    off = "-" if one.bytes_error is None else f"{one.bytes_error:+.1%}"
    parts, within = ", ".join(parts_fitted(one.name)) or "none", "yes" if one.is_within else "no"
    total, error = f"{sum(one.measured.values()) * 1e3:.2f}", f"{one.device_error:+.1%}"
    return [one.name, parts, total, error, within, *groups, memory, off]


def _error(forecast: float, measured: float) -> str:
    return "-" if not measured else f"{forecast / measured - 1.0:+.1%} of {measured * 1e3:.2f}"


def compared(case: Case, profile: Profile) -> Compared:
    """Prices the launches of a recorded case. Raises FlopcastError where record and code do not agree."""
    record = record_of(FOLDER, case.name)
    step = PricedStep(compiled_stream(FOLDER, case), run_of(case), profile)
    forecast: dict[str, float] = defaultdict(float)
    for op in step.ops:
        if op.work is not None:
            forecast[group_of(op.work.op_class)] += op.seconds
    measured = _by_group(joined(FOLDER, case.name))
    timed: dict[str, Any] = record["timed"].get("compile", {})
    moves, peak = step.device_moves, timed.get("peak_bytes")
    return Compared(case.name, dict(forecast), measured, step.own_sigmas, moves, step.peak_bytes, peak)


def _by_group(joined: Joined) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for timed in joined.launches:
        called = group_of(op_class(timed.launch.name))
        group = "generated" if timed.launch.is_generated else _CALLS.get(timed.launch.kind, called)
        found[group] += timed.seconds
    found["optimizer"] += sum(seconds for _, seconds in joined.optimizer)
    for name, seconds in joined.outside:
        found[group_of(class_of_kernel(name))] += seconds
    return dict(found)


if __name__ == "__main__":
    main()
