"""Fits what Python spends around FSDP's collectives and around DTensor's calls, in calls of the host, and what
entering a graph costs that DistributedDataParallel's buckets cut.

    python -m studies.parallel.host

To the steps of three small models (w640, w2048, w3584) on two H200s, with the host that the same run calibrated: what
the host took beyond the forecast without it, over the number of collectives, or of calls, and the time of one eager
call. Of compiled layers and of cut graphs to six steps of Qwen3-0.6B, with the shipped host, since that of their run
was measured eagerly. The constants of `step.communication` and `device_work.PIECE_SHARE` are these.
"""

from __future__ import annotations

from math import log, sqrt
from statistics import fmean, mean, median

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.step.communication import calls_around
from flopcast.roofline.step.device_work import PIECE_SHARE
from flopcast.roofline.step.priced_step import PricedStep
from studies.command import parser_of
from studies.parallel.measured import read
from studies.parallel.timeline import GPU, is_fitted, run_host, run_of, stream_of


def main() -> None:
    parser_of(__spec__, __doc__).parse_args()
    host = run_host()
    call = host.seconds("forward", "launch")
    found: dict[str, list[tuple[float, int]]] = {"sharded": [], "divided": []}
    for step, ranks in read().items():
        stream = stream_of(step) if is_fitted(step) and step.mode == "eager" else None
        around = calls_around(stream) if stream else {}
        if stream is None or not around:
            continue
        priced = PricedStep(stream, run_of(step), find_profile(GPU), host)
        measured = mean(median(rank.host_seconds) for rank in ranks)
        beyond = measured - priced.timeline.enqueue_seconds + sum(around.values()) * call
        found["divided" if "tp" in step.layout else "sharded"].append((beyond / call, len(around)))
        print(
            f"{step.name}: {beyond * 1e3:.1f} ms beyond, around {len(around)}: {beyond / call / len(around):.1f} each"
        )
    off = []
    for name, some in found.items():
        each = sum(calls for calls, _ in some) / sum(count for _, count in some)
        off += [log(calls / count / each) for calls, count in some]
        print(f"{name}: {each:.1f} calls of {call * 1e6:.1f} us each")
    print(f"deviation of the log: {sqrt(fmean(value**2 for value in off)):.2f}")
    compiled()


def compiled() -> None:
    """Of compiled steps: calls around each collective of sharded layers, shares of entering a graph of cut ones."""
    host = default_host()
    call, costs = host.seconds("forward", "launch"), host.graph_costs("compile")
    found: dict[str, list[float]] = {"calls around each collective": [], "of entering a graph": []}
    for step, ranks in read().items():
        if step.mode == "eager" or not is_fitted(step):
            continue
        stream = stream_of(step)
        priced = PricedStep(stream, run_of(step), find_profile(GPU), host)
        beyond = mean(median(rank.host_seconds) for rank in ranks) - priced.timeline.enqueue_seconds
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
