"""Compares recorded compiled steps with what their launches cost by the profile: device time by class, and memory.

    python -m studies.compiled.steps [--only qwen3-0.6b-l2,mlp]

A case's launches come from the code that inductor generated on the GPU, so that the table judges the laws of kernels
and of memory alone; `gate.py` judges the code that is generated without a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from flopcast.errors import FlopcastError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.compiled.launches import Kind
from flopcast.roofline.stream.compiled.profiled import Joined
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.library.modules import module_stream
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.classes import group_of, op_class
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.command import parser_of
from studies.compiled.record import CASES, Case
from studies.compiled.recorded import FOLDER, graphs_of, joined, record_of
from studies.markdown import table

GPU = "nvidia-h200"
GROUPS = ("gemm", "attention", "generated", "optimizer", "reduction", "elementwise")
_CALLS = {
    Kind.PRODUCT: "gemm", Kind.CONVOLUTION: "gemm", Kind.ATTENTION: "attention", Kind.ATTENTION_BACKWARD: "attention",
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A compiled step: seconds of the device by group of classes, forecast and measured, and peak memory in bytes, None
    where it was not recorded."""

    name: str
    forecast: dict[str, float]
    measured: dict[str, float]
    forecast_bytes: int
    measured_bytes: int | None

    @property
    def device_error(self) -> float:
        return sum(self.forecast.values()) / sum(self.measured.values()) - 1.0

    @property
    def bytes_error(self) -> float | None:
        return None if self.measured_bytes is None else self.forecast_bytes / self.measured_bytes - 1.0


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--only", help="names of cases, with commas between")
    wanted = parser.parse_args().only
    chosen = [case for case in CASES if wanted is None or case.name in wanted.split(",")]
    profile = find_profile(GPU)
    rows = []
    for case in chosen:
        try:
            rows.append(row_of(compared(case, profile)))
        except FlopcastError as fault:
            print(f"{case.name}: {fault}")
    print(table(["step", "device, ms", "error", *GROUPS, "peak memory, GB", "error"], rows))


def row_of(one: Compared) -> list[str]:
    groups = [f"{_error(one.forecast.get(g, 0.0), one.measured.get(g, 0.0))}" for g in GROUPS]
    memory = "-" if one.measured_bytes is None else f"{one.measured_bytes / 1e9:.2f}"
    off = "-" if one.bytes_error is None else f"{one.bytes_error:+.1%}"
    return [one.name, f"{sum(one.measured.values()) * 1e3:.2f}", f"{one.device_error:+.1%}", *groups, memory, off]


def _error(forecast: float, measured: float) -> str:
    return "-" if not measured else f"{forecast / measured - 1.0:+.1%} of {measured * 1e3:.2f}"


def compared(case: Case, profile: Profile) -> Compared:
    """Prices the launches of a recorded case. Raises FlopcastError where record and code do not agree."""
    step = PricedStep(to_stream(graphs_of(FOLDER, case.name), eager_stream(case)), run_of(case), profile)
    forecast: dict[str, float] = defaultdict(float)
    for op in step.ops:
        if op.work is not None:
            forecast[group_of(op.work.op_class)] += op.seconds
    measured = _by_group(joined(FOLDER, case.name))
    timed: dict[str, Any] = record_of(FOLDER, case.name)["timed"].get("compile", {})
    return Compared(case.name, dict(forecast), measured, step.peak_bytes, timed.get("peak_bytes"))


def _by_group(joined: Joined) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for timed in joined.launches:
        called = group_of(op_class(timed.launch.name))
        group = "generated" if timed.launch.is_generated else _CALLS.get(timed.launch.kind, called)
        found[group] += timed.seconds
    found["optimizer"] += sum(seconds for _, seconds in joined.optimizer)
    found["elementwise"] += sum(seconds for _, seconds in joined.outside)
    return dict(found)


def run_of(case: Case) -> Run:
    return Run(batch=case.batch, seq=case.seq if case.config else 1, optimizer=case.optimizer)


def eager_stream(case: Case) -> Stream:
    """The stream of the same step without compilation, whose optimizer and parameters the compiled step shares."""
    run = run_of(case)
    if not case.config:
        return module_stream(case.module, run, "cuda", sizes={"batch": case.batch})
    config = load_config(case.config)
    return get_stream(config if case.layers is None else with_depth(config, case.layers), run.traced_on("cuda"))


if __name__ == "__main__":
    main()
