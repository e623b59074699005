"""Fits what Python spends around the collectives of FSDP and of ring attention and around DTensor's calls, in calls of
the host, and what entering a graph costs that DistributedDataParallel's buckets cut.

    python -m studies.parallel.host

Three hosts say it, each with two H200s. Of two, processes ran tiny models of two depths under each layout and without
one (`studies.parallel.phases`): by phase, seconds per layer beyond those of its calls, over the seconds of a call, sums
over processes. Of another, steps of three small models (w640, w2048, w3584): what the host took beyond the forecast
without such calls, over their number, with the host that the same run calibrated. A constant is the mean of the logs of
all, divided over the phases as the tiny models say; of the optimizer the tiny models alone tell. Three further hosts,
of four H100s and twice of two H200s, judge, the last with adapters and by Muon too; ring attention's is the mean of the
logs of the first that ran it and of the H100s.

Of compiled layers and of cut graphs to six steps of Qwen3-0.6B, with the shipped host, since that of their run was
measured eagerly. The constants of `step.communication` and `graph_launches.PIECE_SHARE` are these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from math import log, sqrt
from statistics import fmean, geometric_mean, median, stdev
from typing import Any, NamedTuple

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts, default_host
from flopcast.roofline.step.communication import calls_around, slowest_host_factor
from flopcast.roofline.step.graph_launches import PIECE_SHARE
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.calls.counts import weighted
from studies.command import parser_of
from studies.parallel import phases
from studies.parallel.measured import read
from studies.parallel.timeline import GPU, HOST, is_fitted, run_of, stream_of

PHASES = ("forward", "backward", "optimizer")
LOW, HIGH = phases.DEPTHS
RING = "cp={n},fsdp=1"


class Process(NamedTuple):
    """Seconds per layer of one process of `ranks`, by layout and phase."""

    ranks: int
    per_layer: Mapping[tuple[str, str], float]

    def call(self, phase: str = "forward", alone: str = phases.NONE) -> float:
        """Seconds of a call without a layout."""
        return self.per_layer[alone, phase] / calls_of_layer(alone, phase, self.ranks)

    def beyond(self, layout: str, phase: str) -> float:
        """Seconds per layer beyond those of the layout's calls, by the same model without one."""
        whole = self.per_layer[layout, phase]
        _, mark, trained = layout.partition("+")
        alone = phases.NONE + mark + trained
        if phase == "optimizer":
            return whole - self.per_layer[alone, phase]
        return whole - calls_of_layer(layout, phase, self.ranks) * self.call(phase, alone)


@cache
def tiny_stream(layout: str, depth: int, ranks: int = 2) -> Stream:
    run = Run(batch=4, seq=256, **phases.settings_of(layout, ranks))
    return get_stream(phases.tiny_config(depth), run.traced_on("cuda"))


def calls_of_layer(layout: str, phase: str, ranks: int = 2) -> float:
    """Calls of a layer, views by their weight."""
    counts = [
        weighted(op for op in tiny_stream(layout, depth, ranks).ops if op.phase == phase) for depth in (LOW, HIGH)
    ]
    return (counts[1] - counts[0]) / (HIGH - LOW)


def places_of_layer(layout: str, phase: str) -> float:
    """Operations of a layer around which Python does more."""
    counts = []
    for depth in (LOW, HIGH):
        stream = tiny_stream(layout, depth)
        counts.append(sum(stream.ops[number].phase == phase for number in calls_around(stream)))
    return (counts[1] - counts[0]) / (HIGH - LOW)


def lists(depth: int) -> list[Any]:
    """The optimizer's operations that take tensors in lists."""
    ops = tiny_stream("fsdp={n}", depth).ops
    return [op for op in ops if op.phase == "optimizer" and '"ts"' in op.args]


def processes(host: phases.Host) -> list[Process]:
    """Those that ran on a host, one for each rank of each launch."""
    found: dict[tuple[int, int], dict[tuple[str, str, int], float]] = defaultdict(dict)
    for row in phases.read(host):
        if "step" not in row and "phases" in row and row["mode"] == "eager":
            for phase in PHASES:
                # the first step of a round follows a pause and is slower
                warm = median(one for samples in row["phases"][phase] for one in samples[1:])
                found[row["launch"], row["rank"]][row["layout"], phase, row["depth"]] = warm
    ranks = 1 + max(rank for _, rank in found)
    return [
        Process(
            ranks,
            {
                (layout, phase): (own[layout, phase, HIGH] - seconds) / (HIGH - LOW)
                for (layout, phase, depth), seconds in own.items()
                if depth == LOW and (layout, phase, HIGH) in own
            },
        )
        for own in found.values()
    ]


def tiny_calls(host: phases.Host, layout: str, beside: str = "") -> dict[str, float]:
    """Calls per layer beyond a layout's own, by phase, of a host's processes that ran it and the layout `beside`."""
    needed = [(name, "forward") for name in (layout, beside or layout)]
    having = [one for one in processes(host) if all(name in one.per_layer for name in needed)]
    call = sum(one.call() for one in having)
    found = {phase: sum(one.beyond(layout, phase) for one in having) / call for phase in PHASES}
    spread = [sum(one.beyond(layout, phase) for phase in PHASES) / one.call() for one in having]
    told = ", ".join(f"{value:.0f} in {phase}" for phase, value in found.items())
    least, most = min(spread), max(spread)
    print(f"{host.file.name}, {layout}: per layer {told}; of {len(having)} processes {least:.0f} to {most:.0f}")
    return found


def hosts_of(*layouts: str) -> list[phases.Host]:
    """Those of `phases.HOSTS` that ran all these layouts, but for those that judge."""
    return [host for host in phases.HOSTS if not host.judges and ran(host, *layouts)]


def ran(host: phases.Host, *layouts: str) -> bool:
    return all((name, "forward") in process.per_layer for name in layouts for process in processes(host)[:1])


def ring_calls(host: phases.Host) -> float:
    """Calls around each of ring attention's collectives, beyond those of FSDP over as many GPUs."""
    ranks = processes(host)[0].ranks
    each = [sum(sent.name.startswith("_c10d") for sent in tiny_stream(RING, depth, ranks).ops) for depth in (LOW, HIGH)]
    ring, beside = tiny_calls(host, RING), tiny_calls(host, "fsdp={n}", RING)
    return sum(ring[phase] - beside[phase] for phase in PHASES[:2]) * (HIGH - LOW) / (each[1] - each[0])


def mean_of(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By phase, the mean of the logs."""
    return {phase: geometric_mean(one[phase] for one in each) for phase in PHASES}


def small_steps() -> dict[str, list[float]]:
    """Calls around each collective, or around each call, of the first host's steps: of the slower rank's host, as a
    forecast has it."""
    host = HostCosts.load(HOST)
    call = host.seconds("forward", "launch") * slowest_host_factor(2)
    found: dict[str, list[Any]] = {"sharded": [], "divided": []}
    for step, ranks in read().items():
        stream = stream_of(step) if is_fitted(step) and step.mode == "eager" else None
        around = calls_around(stream) if stream else {}
        if stream is None or not around:
            continue
        priced = PricedStep(stream, run_of(step), find_profile(GPU), host)
        measured = max(median(rank.host_seconds) for rank in ranks)
        beyond = measured - priced.timeline.enqueue_seconds + sum(around.values()) * call
        places = sum(stream.ops[number].phase != "optimizer" for number in around)
        found["divided" if "tp" in step.layout else "sharded"].append((beyond / call, places))
        print(f"{step.name}: {beyond * 1e3:.1f} ms beyond, around {places}: {beyond / call / places:.1f} each")
    return {name: [sum(calls for calls, _ in some), sum(count for _, count in some)] for name, some in found.items()}


def print_adapters_and_muon(host: phases.Host) -> None:
    """Says what tiny models with adapters and by Muon cost on a host."""
    with_adapters = tiny_calls(host, "fsdp={n}+lora")
    each = (with_adapters["forward"] + with_adapters["backward"]) / 3
    print(f"judging FSDP with adapters, {host.said}: {each:.1f} calls a collective")
    muon = f"{phases.NONE}+muon"
    of_muon = [(one.call("optimizer", muon), one.call()) for one in processes(host)]
    calls = ", ".join(f"{1e6 * call:.0f}" for _, call in of_muon)
    over = geometric_mean(own / call for own, call in of_muon)
    print(f"a call of Muon's: {over:.2f} of one of the forward, which takes the processes {calls} us")


def main() -> None:
    parser_of(__spec__, __doc__).parse_args()
    small = {name: calls / count for name, (calls, count) in small_steps().items()}
    fitted = hosts_of("fsdp={n}", "tp={n}")
    by_host = [tiny_calls(host, "fsdp={n}") for host in fitted]
    sharded, divided = mean_of(by_host), mean_of([tiny_calls(host, "tp={n}") for host in fitted])
    for host in (host for host in phases.HOSTS if host not in fitted):
        judging = tiny_calls(host, "fsdp={n}")
        each_collective = (judging["forward"] + judging["backward"]) / 3
        print(f"judging FSDP, {host.said}: {each_collective:.1f} calls a collective")
    for host in (host for host in phases.HOSTS if ran(host, "fsdp={n}+lora")):
        print_adapters_and_muon(host)
    for host in (host for host in phases.HOSTS if host.judges and ran(host, "tp={n}")):
        judging = tiny_calls(host, "tp={n}")
        each = {phase: judging[phase] / places_of_layer("tp={n}", phase) for phase in PHASES[:2]}
        told = f"{each['forward']:.1f} and {each['backward']:.1f} a call of DTensor's"
        print(f"judging the rest, {host.said}: {told}, {ring_calls(host):.1f} around each of ring attention's")
    beside, kept = (tiny_calls(hosts_of(RING)[0], name, RING) for name in ("fsdp={n}", "zero2={n}"))
    # an FSDP layer has three collectives; a layer of tensor parallel so many calls in modules that it divides
    inside = {phase: places_of_layer("tp={n}", phase) for phase in PHASES[:2]}
    share = min(kept["backward"] / beside["backward"], 1.0)  # the reduce-scatter's
    of_sharded = sharded["forward"] + sharded["backward"]
    # the host that ran small steps is one of them
    level = (small["sharded"] * 3 / of_sharded) ** (1 / (len(fitted) + 1))
    logs = [log(calls) for calls in (small["sharded"] * 3, *(one["forward"] + one["backward"] for one in by_host))]
    print(f"deviation of the log between hosts: {stdev(logs):.2f}")
    print(f"sharded, calls a collective: {small['sharded']:.1f} of small steps, {of_sharded / 3:.1f} of tiny models")
    print(f"all-gather, forward: {sharded['forward'] * level:.1f}")
    print(f"all-gather, backward: {sharded['backward'] * (1 - share) * level:.1f}")
    print(f"reduce-scatter: {sharded['backward'] * share * level:.1f}")
    of_divided = (divided["forward"] + divided["backward"]) / sum(inside.values())
    level = (small["divided"] / of_divided) ** (1 / (len(fitted) + 1))
    print(f"divided, calls a call: {small['divided']:.2f} of small steps, {of_divided:.2f} of tiny models")
    for phase, count in inside.items():
        print(f"divided, {phase}: {divided[phase] / count * level:.2f}")
    tensors = sum(len(op.inputs) * (1 if depth == HIGH else -1) for depth in phases.DEPTHS for op in lists(depth))
    for name, found in (("sharded", sharded), ("divided", divided)):
        print(f"{name}, each tensor of the optimizer's lists: {found['optimizer'] * (HIGH - LOW) / tensors:.2f}")
    ring = [ring_calls(host) for host in hosts_of(RING)]
    told = ", ".join(f"{one:.1f}" for one in ring)
    print(f"ring attention, each of its collectives: {geometric_mean(ring):.1f} ({told})")
    deviations = [
        log(sum(one.beyond(layout, phase) for phase in PHASES) / one.call() / sum(found[phase] for phase in PHASES))
        for layout, found in (("fsdp={n}", sharded), ("tp={n}", divided))
        for host in hosts_of(layout)
        for one in processes(host)
    ]
    print(f"deviation of the log between processes: {sqrt(fmean(value**2 for value in deviations)):.2f}")
    compiled()


def compiled() -> None:
    """Of compiled steps: calls around each collective of sharded layers, shares of entering a graph of cut ones."""
    host = default_host()
    call, costs = (
        (of_slowest := host.scaled(slowest_host_factor(2))).seconds("forward", "launch"),
        of_slowest.graph_costs("compile"),
    )
    found: dict[str, list[float]] = {"calls around each collective": [], "of entering a graph": []}
    for step, ranks in read().items():
        if step.mode == "eager" or not is_fitted(step):
            continue
        stream = stream_of(step)
        priced = PricedStep(stream, run_of(step), find_profile(GPU), host)
        beyond = max(median(rank.host_seconds) for rank in ranks) - priced.timeline.enqueue_seconds
        if around := calls_around(stream):
            name, each = "calls around each collective", sum(around.values()) / len(around)
            each += beyond / call / len(around)
        else:
            entered = sum(
                costs.entry(stream.ops[first].phase) for _, first, last in stream.meta["graphs"] if first <= last
            )
            name, each = "of entering a graph", PIECE_SHARE + beyond / entered
        found[name].append(each)
        print(f"{step.name}: {each:.2f} {name}")
    for name, values in found.items():
        print(f"{fmean(values):.2f} {name}")


if __name__ == "__main__":
    main()
