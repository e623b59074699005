"""Says what optimizers cost the host, from tiny models of two depths, by the slope from one to the other.

    python -m studies.calls.optimizers              a call on single tensors, over a call of the forward
    python -m studies.calls.optimizers --adamw OUT  AdamW, torch's fused and flopcast's, with clipping and without

The second measures on a GPU what OUT lacks, and says what a step costs for each parameter and besides, beside what the
shipped host's costs say of the calls that it makes; the usual model's row tells how fast this host is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from flopcast.microbench.recipe.plans import HostPlan
from flopcast.microbench.records import records
from flopcast.roofline.gpu.fit.host import warm_value
from flopcast.roofline.gpu.fit.host_calibration import (
    adamw_host_plans,
    count_ops,
    fine_tune_host_plans,
    host_plan,
    plan_streams,
)
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import default_host, listed_tensors
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.calls.counts import weighted
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table

ROWS = ROOT / "reports" / "nvidia-h200" / "fine-tune" / "hosts"
LOW, HIGH = 2, 6  # layers


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--adamw", type=Path, metavar="OUT", help="folder of the rows of AdamW")
    out = parser.parse_args().adamw
    if out is None:
        report()
        return
    measure(out)
    print(of_adamw({row["key"]: warm_value(cast(FitRow, row)) for row in records.read(out).rows}))


def measure(out: Path) -> None:
    """Measures what the folder lacks of the tiny models of AdamW, where there is a GPU."""
    import torch

    from flopcast.microbench.hosts.host import run_host
    from flopcast.microbench.recipe.compiling import host_builders
    from flopcast.microbench.records.recorder import Recorder
    from flopcast.microbench.timing.device import describe

    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    with Recorder(out, describe(device)) as recorder:
        for plan in (host_plan("cuda"), *adamw_host_plans()):
            builders, _ = host_builders(plan, device)
            print(plan.model, run_host(
                builders, model=plan.model, recorder=recorder, device=device, suite="optimizers", rounds=plan.rounds,
                steps_per_round=plan.steps_per_round,
            ))  # fmt: skip


def of_adamw(seconds: Mapping[str, float]) -> str:
    """A table: per model the microseconds of its optimizer for each parameter and besides, measured and forecast."""
    rows = []
    for plan in (host_plan("cuda"), *adamw_host_plans()):
        streams, ends = plan_streams(plan, "cuda"), (min(plan.configs), max(plan.configs))
        counts = [sum(s.kind == "parameter" for s in streams[depth].storages) for depth in ends]
        measured = line(counts, [seconds[plan.row_key(depth, "optimizer")] for depth in ends])
        forecast = line(counts, [forecast_of(streams[depth]) for depth in ends])
        rows.append([plan.model, *(f"{value * 1e6:.2f}" for value in (*measured, *forecast))])
    return table(["model", "us a parameter", "us besides", "forecast a parameter", "forecast besides"], rows)


def line(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(slope, seconds at none) of the line through two points."""
    each = (seconds[1] - seconds[0]) / (counts[1] - counts[0])
    return each, seconds[0] - each * counts[0]


def forecast_of(stream: Stream) -> float:
    """Host seconds of a stream's optimizer by the shipped host, before what its operators cost beyond ATen calls."""
    costs, counts = default_host().optimizer, count_ops(stream)["optimizer"]
    kinds = {"launch": "launch", "host": "host_op", "tensors": "per_tensor"}
    return costs["fixed"] + sum(costs[cost] * counts.get(kind, 0.0) for kind, cost in kinds.items())


def report() -> None:
    """Prints a row per model whose optimizer works on single tensors."""
    seconds = {row["key"]: warm_value(cast(FitRow, row)) for row in records.read(ROWS).rows}
    usual = host_plan("cuda")
    forward = slope(seconds, usual, "forward") / on_single_tensors(usual, "forward")
    rows = []
    for plan in fine_tune_host_plans():
        if plan.finetune != "full":  # AdamW steps, and peft would be needed
            continue
        calls = on_single_tensors(plan, "optimizer")
        if calls and plan.row_key(LOW, "optimizer") in seconds:
            each = (slope(seconds, plan, "optimizer") - of_lists(plan)) / calls
            rows.append([plan.model, f"{calls:.0f}", f"{each * 1e6:.1f}", f"{each / forward:.2f}"])
    print(f"a call of the forward: {forward * 1e6:.1f} us")
    print(table(["model", "calls of four layers", "us a call", "over the forward's"], rows))


def slope(seconds: dict[str, float], plan: HostPlan, phase: str) -> float:
    return seconds[plan.row_key(HIGH, phase)] - seconds[plan.row_key(LOW, phase)]


def on_single_tensors(plan: HostPlan, phase: str) -> float:
    """Calls on single tensors that the deeper model makes more, views by their weight."""

    def of(stream: Stream) -> float:
        return weighted(op for op in stream.ops if op.phase == phase and '"ts"' not in op.args)

    streams = plan_streams(plan, "cuda")
    return of(streams[HIGH]) - of(streams[LOW])


def of_lists(plan: HostPlan) -> float:
    """Seconds of the tensors in lists, and of the optimizer's work on the host, that the deeper model has more of."""
    host = default_host()

    def of(stream: Stream) -> float:
        ops = [op for op in stream.ops if op.phase == "optimizer" and (op.kind == "host" or '"ts"' in op.args)]
        return sum(host.seconds("optimizer", op.kind, tensors=listed_tensors(op)) for op in ops)

    streams = plan_streams(plan, "cuda")
    return of(streams[HIGH]) - of(streams[LOW])


if __name__ == "__main__":
    main()
