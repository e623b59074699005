"""Says what an optimizer's call of an operator on single tensors costs the host over a call of the forward, from tiny
models of two depths, by the slope from one to the other.

    python -m studies.calls.optimizers
"""

from __future__ import annotations

from typing import cast

from flopcast.microbench.recipe.plans import HostPlan
from flopcast.microbench.records import records
from flopcast.roofline.gpu.fit.host import warm_value
from flopcast.roofline.gpu.fit.host_calibration import fine_tune_host_plans, host_plan, plan_streams
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.calls.counts import weighted
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table

ROWS = ROOT / "reports" / "nvidia-h200" / "fine-tune" / "hosts"
LOW, HIGH = 2, 6  # layers


def main() -> None:
    parser_of(__spec__, __doc__).parse_args()
    report()


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
        return sum(host.seconds("optimizer", op.kind, tensors=len(op.inputs) if '"ts"' in op.args else 0) for op in ops)

    streams = plan_streams(plan, "cuda")
    return of(streams[HIGH]) - of(streams[LOW])


if __name__ == "__main__":
    main()
