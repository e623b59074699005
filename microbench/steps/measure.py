"""Measures a real training step by component: wall clock, kernels, host, memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.training_step import FunctionStep, TrainingStep
from flopcast.microbench.steps.beside import NOTHING, Beside
from flopcast.microbench.timing.mean_clock import ClockProbe
from flopcast.microbench.timing.telemetry import Reading, telemetry, typical_reading

# Ranges and overheads that the profiler lists among operators and kernels, and the kernel that reads the clocks.
_NOT_KERNELS = ("ProfilerStep", "Optimizer.", "Activity Buffer", "Command Buffer", "Context Sync", "read_clocks_kernel")

# Approximate upper limit on the duration of a round, which has at least two steps: steps of 0.3 s spread by 0.2%, and
# five rounds of five of them took 8 s.
LONG_ROUND_SECONDS = 0.6

# Seconds of a round, at least, of a step that met the power limit. Its controller lowers the clock over a second: five
# dense steps on an H200 took 20 to 90 ms each in rounds of 0.1 to 0.4 s, 3 to 7% longer in rounds of a second, and
# within 1% of that in rounds of three.
SUSTAINED_SECONDS = 1.0

# Seconds of rounds between which the pace of the host is measured, and at most how many rounds. Where other machines
# share its cores a decode of 11 ms took 8.8 to 15.0 in five rounds of 0.2 s, and the tiny model beside it 28 to 43 ms:
# of so few neither median is known to better than 10%.
PACED_SECONDS, PACED_ROUNDS = 4.0, 20

# Seconds that the device rests before it is profiled at a step whose like met the power limit. Right after timed rounds
# the kernels of eight dense compiled steps took 4 to 8% longer than is forecast, at 1,515 to 1,710 MHz. What rest does
# not undo is the limit's quick part: the mean clock of four such steps after it was 1,522 to 1,826 of 1,980 MHz
# (`timing.mean_clock`), for 23 ms or for 291. Large products by themselves run at 1,640 (`studies.power.kernels`), so
# that their forecasts are within 7% there.
REST_SECONDS = 1.5


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step: its name, its duration and the ATen call that launched it ("" if unknown)."""

    name: str
    seconds: float
    op: str = ""


@dataclass(frozen=True)
class StepTiming:
    """Seconds of a steady step, one entry per repetition of `steps_per_round` steps in a row; `peak_bytes` as torch's
    allocator counted them, `reserved_bytes` what it took of the device for them, `reading` the device's clocks, power
    and throttling in one more step after the last round, `pace_seconds` what `pace` gave before each round and after
    the last."""

    step_seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    peak_bytes: int | None
    reserved_bytes: int | None
    steps_per_round: int
    reading: Reading | None = None
    pace_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepKernels:
    """What one step runs on the device: `device_seconds` of each profiled step, and the kernels of the last one;
    `reading`: the device's state once the host had launched them; `mean_clock_mhz`: the clock while they ran, which a
    power limit may have lowered (None where it is not known)."""

    device_seconds: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    reading: Reading
    mean_clock_mhz: float | None = None


def time_step(
    step: TrainingStep | InferenceStep,
    *,
    rounds: int = 5,
    steps_per_round: int = 5,
    warm_up: int = 3,
    least_round_seconds: float = 0.0,
    read: Callable[[], Reading] | None = None,
    beside: Beside = NOTHING,
    pace: Callable[[], float] | None = None,
) -> StepTiming:
    """Runs `step` for real, without a profiler.

    `step_seconds`: wall clock of `steps_per_round` steps in a row divided by their number, the device drained at both
    ends; long steps are run fewer times per round (`LONG_ROUND_SECONDS`), and short ones more often, until a round
    takes `least_round_seconds`: draining the device lengthens each of few steps. `host_seconds`: time to enqueue one
    step on an idle device (on the CPU: the whole step). The host blocks where the launch queue is full, so that for a
    device-bound step this exceeds the host's own work. Peak memory includes the first step. Each round of decodes
    begins with the cache that the first had, and each run grows it by a token, as generating does. `read`: reads the
    device's telemetry in the step after the last round, which starts on an idle device and may miss a power limit.
    Where that says that the clock was held down, all rounds are run again for `SUSTAINED_SECONDS` each, as training
    goes on for longer; not those of decodes, whose cache would grow. `pace`: measures how fast the host is, which
    changes by half and more from one second to the next where other machines share its cores; of a GPU's short steps
    more rounds are timed then (`paced_rounds`). All of the first steps but one may run while other processes compute
    (`beside`); the rest has the machine alone.
    """
    if step.device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(warm_up - 1):
        beside.first(step)
    with beside.still():
        return _timed(step, rounds, steps_per_round, least_round_seconds, read, pace)


def _timed(
    step: TrainingStep | InferenceStep, rounds: int, steps_per_round: int, least_round_seconds: float,
    read: Callable[[], Reading] | None, pace: Callable[[], float] | None,
) -> StepTiming:  # fmt: skip
    """Runs the last of the first steps, which tells how many a round takes, and the rounds."""
    is_cuda = step.device_type == "cuda"
    _drain(step)
    start = time.perf_counter()
    step.run()
    _drain(step)
    last = max(time.perf_counter() - start, 1e-9)
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if is_cuda else (None, None)
    steps_per_round = max(min(2, steps_per_round), min(steps_per_round, int(LONG_ROUND_SECONDS / last)))
    steps_per_round = max(steps_per_round, int(least_round_seconds / last))
    if is_cuda and pace is not None:
        rounds = max(rounds, paced_rounds(steps_per_round * last))
    if read is not None:
        read()  # from which on the share of the cores that others use counts
    timing = _rounds(step, rounds, steps_per_round, read, pace)
    paces = timing.pace_seconds
    is_held = timing.reading is not None and timing.reading.throttled
    if is_held and not (isinstance(step, InferenceStep) and step.phase == "decode"):
        timing = _rounds(step, rounds, max(steps_per_round, ceil(SUSTAINED_SECONDS / last)), read)
    return replace(timing, peak_bytes=peak, reserved_bytes=reserved, pace_seconds=paces)


def paced_rounds(round_seconds: float) -> int:
    """Returns how many rounds are timed at least, where the pace of the host is measured between them."""
    return min(int(PACED_SECONDS / round_seconds), PACED_ROUNDS)


def _drain(step: TrainingStep | InferenceStep) -> None:
    if step.device_type == "cuda":
        torch.cuda.synchronize()


def _rounds(
    step: TrainingStep | InferenceStep, rounds: int, steps_per_round: int, read: Callable[[], Reading] | None,
    pace: Callable[[], float] | None = None,
) -> StepTiming:  # fmt: skip
    """Times `rounds` rounds of so many steps in a row, each followed by a step whose phases the host enqueues apart."""
    paces: list[float] = []
    walls: list[float] = []
    hosts: list[float] = []
    phases: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    reading: Reading | None = None
    gc.collect()
    with no_garbage_collection():
        for number in range(rounds):
            if pace is not None:
                paces.append(pace())
            if isinstance(step, InferenceStep):
                step.refill()
            _drain(step)
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step.run()
            _drain(step)
            walls.append((time.perf_counter() - start) / steps_per_round)
            spent = dict.fromkeys(phases, 0.0)
            mark = time.perf_counter()
            for phase in step.phases():
                now = time.perf_counter()
                spent[phase] += now - mark
                mark = now
            if read is not None and number == rounds - 1:
                reading = read()
            _drain(step)
            hosts.append(sum(spent.values()))
            for name, seconds in spent.items():
                phases[name].append(seconds)
        if pace is not None:
            paces.append(pace())
    return StepTiming(
        step_seconds=tuple(walls),
        host_seconds=tuple(hosts),
        forward_seconds=tuple(phases["forward"]),
        backward_seconds=tuple(phases["backward"]),
        optimizer_seconds=tuple(phases["optimizer"]),
        peak_bytes=None,
        reserved_bytes=None,
        steps_per_round=steps_per_round,
        reading=reading,
        pace_seconds=tuple(paces),
    )


def profile_step(step: TrainingStep | InferenceStep, *, warm_up: int = 2) -> StepKernels:
    """Profiles `step`. All timing has to come first: once CUDA's profiler has been used, every later launch of the
    process costs more (H200, torch 2.11: a tiny op takes 6.5 us of host time before and 8.8 after, a step of width 256
    and 6 layers 19 and 22 ms). Where the power limit holds the clock down the device rests before each profiled step,
    as it does before the kernels that forecasts are made of."""
    read = telemetry(torch.device(step.device_type))
    is_held = False
    for _ in range(warm_up):
        step.run()
        is_held = is_held or read().throttled
    readings: list[Reading] = []

    runs: list[tuple[Kernel, ...]] = []
    clocks: list[float | None] = []
    is_cuda = step.device_type == "cuda"
    probe = _clock_probe() if is_cuda else None
    for with_ops in (False, False, True) if is_cuda else (True,):
        if is_cuda and (is_held or any(reading.throttled for reading in readings)):
            rest()
        runs.append(profile_kernels(step, with_ops=with_ops, while_busy=lambda: readings.append(read()), probe=probe))
        clocks.append(None if probe is None else probe.mean_mhz())
    known = [clock for clock in clocks if clock is not None]
    return StepKernels(
        device_seconds=tuple(sum(kernel.seconds for kernel in kernels) for kernels in runs),
        kernels=runs[-1],
        reading=typical_reading(readings),
        mean_clock_mhz=median(known) if known else None,
    )


def _clock_probe() -> ClockProbe | None:
    """None where there is no Triton."""
    try:
        return ClockProbe(torch.device("cuda", torch.cuda.current_device()))
    except ImportError:
        return None


def rest() -> None:
    """Lets the device rest for REST_SECONDS, one thread of it busy, which draws little but keeps its clock up: an idle
    device lets it go."""
    spin: Any = torch.cuda._sleep
    torch.cuda.synchronize()
    end = time.perf_counter() + REST_SECONDS
    while time.perf_counter() < end:
        spin(1_000_000)  # cycles: half a millisecond
        torch.cuda.synchronize()


def profile_kernels(
    step: TrainingStep | InferenceStep | FunctionStep, *, with_ops: bool = False,
    while_busy: Callable[[], None] = lambda: None, probe: ClockProbe | None = None,
) -> tuple[Kernel, ...]:  # fmt: skip
    """The kernels of one steady step in launch order; copies and fills of memory count as kernels.

    `with_ops` names the ATen call that launched each, which slows the host; `while_busy` is called once the host has
    launched all; `probe` is marked before the step and behind it. On the CPU a "kernel" is an operator's own time,
    without that of the operators it calls.
    """
    if step.device_type != "cuda":
        return _profile_operators(step)
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if with_ops else [])]
    torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        if probe is not None:
            probe.mark()
        step.run()
        if probe is not None:
            probe.mark()
        while_busy()
        torch.cuda.synchronize()
    results: Any = profiler.profiler.kineto_results
    events = results.events()
    on_host = [e for e in events if str(e.device_type()).endswith("CPU") and not e.name().startswith(_NOT_KERNELS)]
    ops = {e.correlation_id(): e.name() for e in on_host}
    on_device = [e for e in events if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0]
    on_device = [e for e in on_device if not e.name().startswith(_NOT_KERNELS)]
    on_device.sort(key=lambda e: e.start_ns())
    alone = seconds_alone([(e.device_resource_id(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device])
    return tuple(
        Kernel(e.name(), seconds, ops.get(e.linked_correlation_id(), "") if with_ops else "")
        for e, seconds in zip(on_device, alone, strict=True)
    )


def seconds_alone(spans: Iterable[tuple[int, int, int]]) -> list[float]:
    """Returns the seconds of kernels from when the one before them on their CUDA stream was done, given (stream, start,
    end) in nanoseconds, by their start.

    A kernel that is launched before the one before it has ended (programmatic dependent launch, as Triton's
    products) is resident and waits, which a profiler counts as its time: of Qwen3 1,024 wide gradients of inputs
    were recorded at twice what they take, since the weights' gradient before them counted twice."""
    done: dict[int, int] = {}
    found = []
    for stream, start, end in spans:
        found.append(max(end - max(start, done.get(stream, start)), 0) * 1e-9)
        done[stream] = max(end, done.get(stream, end))
    return found


def _profile_operators(step: TrainingStep | InferenceStep | FunctionStep) -> tuple[Kernel, ...]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step.run()
    return tuple(
        Kernel(event.name, event.self_cpu_time_total * 1e-6, event.name)
        for event in profiler.events()
        if event.name.startswith("aten::") and event.self_cpu_time_total > 0
    )
