"""Compares a real step with its forecast, quantity by quantity.

Errors are signed, forecast / measured - 1: errors that cancel in the step show in its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.stream.lowering.classes import GROUPS


@dataclass(frozen=True)
class Part:
    """One quantity of a step: seconds, bytes or a count. None where it was not measured or cannot be forecast.

    `low` and `high` are the ends of the forecast's 90% interval. `is_comparable` is False where measurement and
    forecast are of different quantities: the host's time, where it waited for the device.
    """

    measured: float | None = None
    forecast: float | None = None
    low: float | None = None
    high: float | None = None
    is_comparable: bool = True

    @property
    def error(self) -> float | None:
        """forecast / measured - 1; None where either is missing or nothing was measured."""
        return signed_error(self.forecast, self.measured) if self.is_comparable else None

    @property
    def is_within(self) -> bool | None:
        """Whether the measured value lies inside the forecast's interval."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    @property
    def interval_width(self) -> float | None:
        """Width of the interval over the forecast, for quantities that were measured."""
        if self.is_within is None or self.low is None or self.high is None or not self.forecast:
            return None
        return (self.high - self.low) / self.forecast


def signed_error(forecast: float | None, measured: float | None) -> float | None:
    """forecast / measured - 1; None where either is missing or nothing was measured."""
    return None if forecast is None or not measured or measured <= 0 else forecast / measured - 1


# Other methods that forecast the same steps (`baselines.py`).
METHODS = ("roofline", "six_n", "torch")
# The settings of a plan that have a column each.
_SETTINGS = (
    "batch", "seq", "precision", "optimizer", "matmul", "attention", "accumulate", "checkpoint", "fused", "clip",
    "finetune", "lora_rank", "lora_targets", "base_dtype", "phase", "context", "cache", "module", "mode",
)  # fmt: skip
_OF_SIZE = ("batch", "seq", "context")  # which a label says first


@dataclass(frozen=True)
class StepComparison:
    """A real step beside its forecast. A step that did not run, or cannot be forecast, has a `reason` and empty parts.

    `step`, `device` and `host` are seconds, `peak` is bytes of memory, `kernels` a count; `classes` holds the device's
    seconds by the groups of `classes.GROUPS`, `baselines` the step's seconds by METHODS.
    `step` is forecast with the host that ran beside the step, where there was one, and `profile_host_step` with the
    profile's, as a user gets it; `host_sigma` is the deviation of the logarithm of the former (None: the profile's was
    taken). `in_a_row`: a compiled `step` as one of as few as were timed in a row, of which the last was waited for.
    `own_sigmas`: by group, the deviation of the log of its forecast seconds by the errors of single shapes.
    `others_share`: of the machine's cores, that other processes kept busy while the step ran; `is_busy` where
    that made it longer. `rounds`: how many times the step was timed, of which the median counts.
    """

    plan: StepPlan
    status: str
    reason: str | None = None
    n_params: int | None = None
    step: Part = Part()
    profile_host_step: Part = Part()
    in_a_row: Part = Part()
    device: Part = Part()
    host: Part = Part()
    peak: Part = Part()
    kernels: Part = Part()
    classes: Mapping[str, Part] = field(default_factory=lambda: dict.fromkeys(GROUPS, Part()))
    baselines: Mapping[str, Part] = field(default_factory=lambda: dict.fromkeys(METHODS, Part()))
    host_sigma: float | None = None
    own_sigmas: Mapping[str, float] = field(default_factory=dict)
    bound: str | None = None
    measured_share: float | None = None
    host_calibrated: str = "with the profile"
    used_in_intervals: bool = False
    clock_mhz: float | None = None
    rounds: int | None = None
    others_share: float | None = None
    is_busy: bool = False
    transformers: str | None = None
    torch: str | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """The quantities whose errors are reported: step, device, host, peak memory, and the device's time by class."""
        return {"step": self.step, "device": self.device, "host": self.host, "peak": self.peak, **self.classes}

    @property
    def width(self) -> int | None:
        config = self.plan.config
        return config.get("hidden_size", config.get("n_embd"))

    @property
    def depth(self) -> int | None:
        config = self.plan.config
        return config.get("num_hidden_layers", config.get("n_layer"))

    @property
    def is_host_bound(self) -> bool:
        return self.bound == "host"

    @property
    def label(self) -> str:
        """w1024-d5 4x256 fused triton: the name, the batch, and every setting that is not the usual one. Of a call of
        inference the tokens of a sequence are its context."""
        plan = self.plan
        words = {
            "optimizer": "fused" if plan.optimizer == "adamw-fused" else plan.optimizer, "matmul": plan.matmul,
            "attention": plan.attention,
            "precision": plan.precision, "checkpoint": "checkpoint", "accumulate": f"accumulate {plan.accumulate}",
            "fused": f"fused {plan.fused}", "clip": f"clip {plan.clip:g}", "finetune": plan.finetune,
            "lora_rank": f"rank {plan.lora_rank}", "lora_targets": plan.lora_targets, "base_dtype": plan.base_dtype,
            "mode": plan.mode, "phase": plan.phase, "cache": f"{plan.cache} cache",
        }  # fmt: skip
        unusual = {name: f"{name} {value}" for name, value in plan.unusual.items() if name not in _OF_SIZE}
        told = [words.get(name, unusual[name]) for name in {**words, **unusual} if name in unusual]
        size = f"{plan.batch}" if plan.module else f"{plan.batch}x{plan.context or plan.seq}"
        return " ".join([plan.name, size, *dict.fromkeys(told)])

    @property
    def label_with_optimizer(self) -> str:
        """The step's label with its optimizer: w256-d4 4x256 adamw."""
        return f"{self.plan.name} {self.plan.batch}x{self.plan.seq} {self.plan.optimizer}"

    def to_json(self) -> dict[str, Any]:
        """The row of validation.csv and of `validate --json`: flat, the same names in the same order for every step."""

        def cells(name: str, part: Part) -> dict[str, Any]:
            return {f"{name}_seconds": part.measured, f"{name}_forecast": part.forecast, f"{name}_error": part.error}

        return {
            "name": self.plan.name, "group": self.plan.group, "width": self.width, "depth": self.depth,
            **{name: getattr(self.plan, name) for name in _SETTINGS},
            "n_params": self.n_params, "status": self.status, "reason": self.reason,
            "step_seconds": self.step.measured, "step_forecast": self.step.forecast, "step_low": self.step.low,
            "step_high": self.step.high, "step_error": self.step.error, "within_interval": self.step.is_within,
            "interval_width": self.step.interval_width,
            "step_error_profile_host": self.profile_host_step.error,
            "within_interval_profile_host": self.profile_host_step.is_within,
            "interval_width_profile_host": self.profile_host_step.interval_width,
            **cells("device", self.device),
            "device_low": self.device.low, "device_high": self.device.high, "device_within": self.device.is_within,
            **cells("host", self.host), "host_sigma": self.host_sigma,
            "peak_bytes": self.peak.measured, "peak_forecast": self.peak.forecast, "peak_error": self.peak.error,
            "kernels": self.kernels.measured, "kernels_forecast": self.kernels.forecast, "bound": self.bound,
            **{key: value for name in GROUPS for key, value in cells(name, self.classes[name]).items()},
            **{
                f"{name}_{what}": getattr(self.baselines[name], what)
                for name in METHODS
                for what in ("forecast", "error")
            },
            "measured_share": self.measured_share, "host_calibrated": self.host_calibrated,
            "used_in_fit": False,  # no real step ever is
            "used_in_intervals": self.used_in_intervals, "clock_mhz": self.clock_mhz,
            "others_share": self.others_share,
            "transformers": self.transformers, "torch": self.torch,
        }  # fmt: skip


COLUMNS = tuple(StepComparison(StepPlan(name="", config={}), "ok").to_json())


def write_csv(rows: Sequence[StepComparison], path: Path) -> None:
    """Writes all columns, with empty cells for missing values. Raises UsageError if the file cannot be written."""
    write_rows(path, COLUMNS, (row.to_json() for row in rows))
