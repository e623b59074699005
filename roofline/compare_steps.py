"""What two profiles say of a training step: the last lines of `flopcast compare`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flopcast.roofline.forecast import Run, forecast
from flopcast.roofline.models import load_config
from flopcast.roofline.profile import Profile

STEPS = (
    ("qwen3-0.6b", "4 x 256", Run()),
    ("qwen3-0.6b", "8 x 1024, fused AdamW", Run(batch=8, seq=1024, optimizer="adamw-fused")),
)


@dataclass(frozen=True)
class StepChange:
    """A step forecast with either profile: seconds with the ends of a 90% interval, and the device's part."""

    name: str
    a: tuple[float, float, float]
    b: tuple[float, float, float]
    device_a: float
    device_b: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def step_changes(a: Profile, b: Profile) -> list[StepChange]:
    """Of STEPS, by their shipped streams; none where one of the two is a processor."""
    if "cpu" in (a.device.get("type"), b.device.get("type")):
        return []
    found = []
    for model, how, run in STEPS:
        one, two = (forecast(load_config(model), run, profile) for profile in (a, b))
        a_ends, b_ends = ((f.step_seconds, f.step_seconds_low, f.step_seconds_high) for f in (one, two))
        found.append(StepChange(f"{model}, {how}", a_ends, b_ends, one.device_seconds, two.device_seconds))
    return found
