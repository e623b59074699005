"""A step that somebody published, and its forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flopcast.roofline.step.forecast import Forecast
from studies.markdown import table


@dataclass(frozen=True)
class Judged:
    """A published step of a `kind`, called `name`, which took so many `seconds`, and its forecast. `more_seconds`: what
    a part of the step took longer as they ran it than what is forecast of it. `memory`: bytes that the allocator had
    reserved at most, 0 where nobody says it. `is_told`: whether a page names the step, whose source anybody can
    read."""

    kind: str
    name: str
    seconds: float
    forecast: Forecast
    more_seconds: float = 0.0
    memory: float = 0.0
    is_told: bool = False

    @property
    def error(self) -> float:
        """Of the step's time, forecast over measured less 1."""
        return (self.forecast.step_seconds + self.more_seconds) / self.seconds - 1

    @property
    def error_as_forecast(self) -> float:
        """As `error`, without what they ran otherwise."""
        return self.forecast.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return self.forecast.reserved_bytes / self.memory - 1 if self.memory else None

    @property
    def is_within(self) -> bool:
        low, high = (
            end + self.more_seconds for end in (self.forecast.step_seconds_low, self.forecast.step_seconds_high)
        )
        return low <= self.seconds <= high

    def __str__(self) -> str:
        step = self.forecast
        memory = "" if self.memory_error is None else f", memory {self.memory_error:+.1%}"
        return (
            f"{self.name}: {self.error:+.1%} ({self.error_as_forecast:+.1%} as forecast), bound by {step.bound}, "
            f"device {step.device_seconds:.3f} s of {step.step_seconds:.3f} ({step.step_seconds_low:.3f} to "
            f"{step.step_seconds_high:.3f}), host {step.host_seconds:.3f}, exposed "
            f"{step.exposed_communication_seconds:.3f}, inside {self.is_within}{memory}"
        )


def attention_seconds(found: Forecast) -> float:
    """Of attention's kernels."""
    return sum(share.seconds for share in found.breakdown if share.op_class == "attention")


def summary(found: Sequence[Judged]) -> str:
    """A table of the errors by kind."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        some = [one for one in found if one.kind == kind]
        errors = [one.error for one in some]
        rows.append([
            kind, str(len(some)), f"{median(map(abs, errors)):.1%}", f"{max(map(abs, errors)):.1%}",
            f"{median(errors):+.1%}", f"{sum(one.is_within for one in some)} of {len(some)}",
        ])  # fmt: skip
    return table(["steps", "rows", "error, median", "worst", "signed, median", "inside 90%"], rows)
