"""What runs on GPUs alone, on streams of a clock that is made up: counts, streams and what is divided by what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flopcast.microbench.collectives import beside, clock, measure
from flopcast.microbench.collectives.operations import Operation
from flopcast.microbench.timing.telemetry import Reading

WORK, COLLECTIVE, SLOWER = 0.2e-3, 1e-3, 1.4


class Stream:
    """A queue on a device: the time at which it will be done."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.done = machine, 0.0
        machine.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.done = max(self.done, event.at)


class Event:
    machine: Machine

    def __init__(self, **_options: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = self.machine.current.done

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Machine:
    """A device with streams. A kernel takes longer where another stream has work beyond the kernel's beginning."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def run(self, seconds: float) -> None:
        is_shared = any(other.done > self.current.done for other in self.streams if other is not self.current)
        self.current.done += seconds * (SLOWER if is_shared else 1.0)

    @contextmanager
    def stream(self, chosen: Stream) -> Iterator[None]:
        before, self.current = self.current, chosen
        yield
        self.current = before

    def synchronize(self, _device: Any = None) -> None:
        latest = max(stream.done for stream in self.streams)
        for stream in self.streams:
            stream.done = latest


class Graph:
    def __init__(self, call: Callable[[], Any], count: int) -> None:
        self.call, self.count = call, count

    def replay(self) -> None:
        for _ in range(self.count):
            self.call()


class Timer:
    """Stands for CudaTimer."""

    device = torch.device("cpu")

    def __init__(self, machine: Machine) -> None:
        self.machine, self.stream = machine, machine.current

    def spin(self, seconds: float) -> None:
        self.machine.current.done += seconds

    def capture(self, calls: list[Callable[[], Any]], count: int) -> Graph:
        return Graph(calls[0], count)

    def read(self) -> Reading:
        return Reading(clock_mhz=1980.0)


class Alone:
    """Stands for a group of which all members are alike."""

    handle = None

    def longest(self, value: float) -> float:
        return value


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(Event, "machine", made, raising=False)
    for name, value in (("Event", Event), ("stream", made.stream), ("synchronize", made.synchronize)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(made))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_args, **_options: made.run(10e-6))
    return made


def test_kernels_and_collectives_are_timed_alone_and_beside(machine: Machine) -> None:
    timer: Any = Timer(machine)
    group: Any = Alone()
    found = beside._beside(
        timer, lambda: machine.run(WORK), lambda: machine.run(COLLECTIVE), lambda: machine.run(1e-3), group
    )
    assert found["alone_seconds"] == pytest.approx(WORK)
    assert found["value"] == pytest.approx(SLOWER * WORK)
    assert found["collective_alone_seconds"] == pytest.approx(COLLECTIVE)
    assert found["collective_beside_seconds"] == pytest.approx(SLOWER * COLLECTIVE)
    assert found["clock_mhz"] == 1980.0


@pytest.mark.parametrize(("seconds", "kind", "calls"), [(10e-6, "graph", 16), (1e-3, "events", 1)])
def test_short_collectives_are_replayed_and_long_ones_launched(
    machine: Machine, seconds: float, kind: str, calls: int
) -> None:
    timed = clock.Clock(torch.device("cpu"))
    timed.timer = Timer(machine)  # type: ignore[assignment]
    group: Any = Alone()
    found = timed.time(lambda: machine.run(seconds), group)
    assert (found.timer, found.calls) == (kind, calls)
    assert found.median == pytest.approx(seconds)
    assert len(found.seconds) >= clock.LEAST_SAMPLES


def test_the_host_is_timed_from_python_and_in_a_graph(machine: Machine) -> None:
    data = torch.zeros(4)
    timer: Any = Timer(machine)
    group: Any = Alone()
    found = measure._launch_cost(Operation(lambda: machine.run(5e-6), data, data), group, timer, lambda: None)
    assert found["value"] > 0
    assert found["captured_seconds"] > 0
    assert found["n"] == measure.ROUNDS
