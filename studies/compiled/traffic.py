"""Records generated kernels that read and write memory in different shares, one launch a function.

    python -m studies.compiled.traffic OUT     on a GPU: OUT/traffic.code.gz and OUT/traffic.json.gz, as `record.py` has
    ... --configurations                       OUT/configurations.json: with each of the two that inductor times
    python -m studies.compiled.traffic         prints a table of what is committed of the latter

The six steps that the law of generated kernels was fitted to read twice what they write or more, by nearly all of their
bytes. What widens, repeats or fills writes more than it reads, a cache repeated for each query's head twice as much,
and memory that turns from reading to writing loses time. Each function is compiled by itself, for three sizes, and
profiled in rounds, one after another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from studies.command import parser_of
from studies.compiled.record import Case, keep, keep_code, steady
from studies.imports import ROOT
from studies.markdown import table

CASE = Case("traffic", module="studies.compiled.traffic:functions")
SIZES = (60e6, 250e6, 1.2e9)  # bytes that are read and written together
SHORT_SIZES = (1e6, 4e6, 16e6, 40e6, 120e6)  # of which the configuration is left to chance, and some that are longer
CONFIGURATIONS = ROOT / "reports" / "nvidia-h200" / "traffic" / "configurations.json"
EDGES = (0, 4, 8, 16, 30, 60, 1000)  # us, between which kernels are counted
ROUNDS = 7
WARM_UP = 2000  # calls of the first function, a few hundredths of a second, until the clock is up
KERNEL = re.compile(r"\btriton_(?:poi|per|red)_")
HEADS, HEAD_DIM = 8, 128  # of a cache of keys

Function = Callable[..., Any]


def repeated(times: int) -> Function:
    def repeat(cache: Tensor) -> Tensor:
        batch, heads, tokens, dim = cache.shape
        wide = cache[:, :, None].expand(batch, heads, times, tokens, dim)
        return wide.reshape(batch, heads * times, tokens, dim)

    return repeat


def sum_of(*operands: Tensor) -> Tensor:
    found = operands[0]
    for other in operands[1:]:
        found = found + other
    return found


def scaled_by(times: int) -> Function:
    def scaled(operand: Tensor) -> tuple[Tensor, ...]:
        return tuple(operand * (2.0 + number) for number in range(times))

    return scaled


def widened(operand: Tensor) -> Tensor:
    return operand.float()


def narrowed(operand: Tensor) -> Tensor:
    return operand.bfloat16()


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def summed(operand: Tensor) -> Tensor:
    return operand.float().sum(-1)


def filled(like: Tensor) -> Tensor:
    return torch.zeros_like(like)


def functions(device: torch.device, total: float) -> list[tuple[Function, list[Tensor]]]:
    """Functions and operands that read and write `total` bytes."""

    def flat(share: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Rows of 1,024 elements with so much of all bytes."""
        rows = int(share * total / dtype.itemsize / 1024)
        return torch.ones(rows, 1024, dtype=dtype, device=device)

    def cache(share: float) -> Tensor:
        tokens = int(share * total / (2 * 16 * HEADS * HEAD_DIM))
        return torch.ones(16, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=device)

    single = torch.float32
    return [
        (scaled_by(1), [flat(1 / 2)]), (scaled_by(1), [flat(1 / 2, single)]), (scaled_by(2), [flat(1 / 3)]),
        (scaled_by(4), [flat(1 / 5)]), (widened, [flat(1 / 3)]), (narrowed, [flat(2 / 3, single)]),
        (sum_of, [flat(1 / 3) for _ in range(2)]), (sum_of, [flat(1 / 4) for _ in range(3)]),
        (sum_of, [flat(1 / 5) for _ in range(4)]), (gated, [flat(1 / 3) for _ in range(2)]),
        (summed, [flat(1.0)]), (filled, [flat(1.0)]),
        *((repeated(times), [cache(1 / (1 + times))]) for times in (2, 4, 8)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A function's code, whose kernel has a name of its own, and the call that launches it."""

    code: str
    call: Callable[[], Any]


def compiled(function: Function, operands: list[Tensor], number: int) -> Compiled:
    """The function by itself: a code object of its own is compiled for these sizes, whatever others came before."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    own: Any = function
    again = FunctionType(own.__code__.replace(), own.__globals__, own.__name__, None, own.__closure__)
    run: Function = torch.compile(again, dynamic=False)
    run(*operands)
    (code,) = codes
    return Compiled(KERNEL.sub(rf"\g<0>{number}_", code), lambda: run(*operands))


def profiled(calls: Sequence[Compiled], device: torch.device) -> list[tuple[str, float]]:
    """[name, seconds] of the generated kernel of each call, one after another, on a device that has no rest: its clock
    is up, and what a call touches left the L2 long ago."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for one in [*[calls[0]] * WARM_UP, *calls]:
            one.call()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    own = sorted((event for event in events if KERNEL.match(event.name)), key=lambda event: event.time_range.start)
    return [
        (KERNEL.sub(rf"\g<0>{number}_", event.name), event.device_time_total * 1e-6)
        for number, event in enumerate(own[-len(calls) :])
    ]


@contextmanager
def taking(place: int, timed: list[list[float]]) -> Iterator[None]:
    """Within the context inductor takes the configuration of this place, of kernels that have several. `timed` gets the
    microseconds that it measured of each."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    own: Any = CachingAutotuner.benchmark_all_configs

    def benchmark(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        if len(found) > 1:
            timed.append([round(milliseconds * 1e3, 2) for milliseconds in found.values()])
        return {launcher: float(number != place) for number, launcher in enumerate(found)}

    CachingAutotuner.benchmark_all_configs = benchmark  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.benchmark_all_configs = own  # type: ignore[method-assign]


def configurations(device: torch.device) -> list[dict[str, Any]]:
    """Rows of the pointwise kernels: bytes, name, microseconds with programs of 1,024 elements by 4 warps and of 512 by
    8, and what inductor timed of both in each of the two compilations."""
    found: list[list[tuple[str, float]]] = []
    timed: list[list[list[float]]] = []
    for place in (0, 1):
        timed.append([])
        with taking(place, timed[-1]):
            made = [(total, *one) for total in SHORT_SIZES for one in functions(device, total)]
            calls = [compiled(function, operands, number) for number, (_, function, operands) in enumerate(made)]
            runs = [profiled(calls, device) for _ in range(ROUNDS)]
        found.append([(runs[0][n][0], median(run[n][1] for run in runs)) for n in range(len(calls))])
    pointwise = [number for number, (name, _) in enumerate(found[0]) if "_poi_" in name]
    return [
        {"bytes": made[number][0], "kernel": re.sub(r"(?<=_poi_)[0-9]+_", "", found[0][number][0]),
         "us": [round(one[number][1] * 1e6, 2) for one in found], "timed_us": [first, second]}
        for number, first, second in zip(pointwise, *timed, strict=True)
    ]  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table by how long the kernels take with the second configuration."""
    lines = []
    for least, most in pairwise(EDGES):
        some = [row for row in rows if least <= row["us"][1] < most]
        timed = [one for row in some for one in row["timed_us"]]
        ratios = sorted(row["us"][1] / row["us"][0] for row in some)
        lines.append([
            f"{least} to {most}", str(len(some)), f"{median(ratios):.2f}", f"{ratios[-1]:.2f}",
            f"{median(one[0] for one in timed):.0f}", f"{sum(b < a for a, b in timed)} of {len(timed)}",
        ])  # fmt: skip
    head = ["us, second configuration", "kernels", "over the first, median", "most", "inductor timed, us, median"]
    return table([*head, "second picked"], lines)


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--configurations", action="store_true")
    options = parser.parse_args()
    if options.out is None:
        print(report(json.loads(CONFIGURATIONS.read_text())))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda")
    torch._inductor.config.force_disable_caches = True
    with torch.no_grad():
        if options.configurations:
            lines = ",\n".join(json.dumps(row) for row in configurations(device))
            (options.out / CONFIGURATIONS.name).write_text(f"[\n{lines}\n]\n")
        else:
            record(options.out, device)


def record(out: Path, device: torch.device) -> None:
    made = [one for total in SIZES for one in functions(device, total)]
    calls = [compiled(function, operands, number) for number, (function, operands) in enumerate(made)]
    runs = [profiled(calls, device) for _ in range(ROUNDS)]
    keep_code(CASE, out, [one.code for one in calls])
    keep(CASE, out, {}, {"compile": steady(runs)})


if __name__ == "__main__":
    main()
