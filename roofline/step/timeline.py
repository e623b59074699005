"""A step's operations on a part, steady: what a step takes with its queue, its gaps between kernels and its power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.power_limit import Draw, draw_of
from flopcast.roofline.step.simulation import Simulation

# For a profile that measured none of these: values of the one H200 (torch 2.11).
GAP_SECONDS, QUEUE_DEPTH, SYNC_SECONDS = 1e-6, 1024, 2e-5


def is_synchronous(profile: Profile) -> bool:
    """Whether an operation is done when its call returns: the CPU as a device."""
    return bool(profile.device.get("type") == "cpu")


@dataclass(frozen=True)
class Timeline:
    """The operations of a step, in order, on the part that `profile` describes."""

    ops: Sequence[TimedOp]
    profile: Profile

    @cached_property
    def host_seconds(self) -> float:
        """What enqueuing one step takes, without waiting."""
        return sum(op.host_seconds for op in self.ops)

    @cached_property
    def device_seconds(self) -> float:
        """The kernels' summed time at full clock."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def draw(self) -> Draw:
        return draw_of(self.ops, self.profile)

    @property
    def gap_seconds(self) -> float:
        return self.profile.ceiling("kernel_gap", GAP_SECONDS)

    @cached_property
    def _simulation(self) -> Simulation:
        return Simulation(self.ops, round(self.profile.ceiling("queue_depth", QUEUE_DEPTH)))

    def step_seconds(
        self,
        *,
        host_factor: float = 1.0,
        device_factor: float = 1.0,
        gap_factor: float = 1.0,
        power_factor: float = 1.0,
    ) -> float:
        """Seconds of one of many steps in a row: of a host, of kernels or of gaps so many times as slow, of work that
        takes `power_factor` times the energy."""
        if is_synchronous(self.profile):
            return self.host_seconds * host_factor + self.device_seconds * device_factor
        at_full_clock = self._simulation.run(
            gap_seconds=self.gap_seconds * gap_factor, sync_seconds=self.profile.ceiling("sync", SYNC_SECONDS),
            host_factor=host_factor, device_factor=device_factor,
        )  # fmt: skip
        return at_full_clock + self.draw.times(power_factor).added_seconds(at_full_clock)
