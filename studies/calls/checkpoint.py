"""Says what checkpointing a layer's activations costs the host beyond the calls that it makes, from tiny models with
adapters of two depths, by the slope from one to the other. Needs peft.

    python -m studies.calls.checkpoint
"""

from __future__ import annotations

from typing import cast

from flopcast.microbench.records import records
from flopcast.roofline.gpu.fit.host import warm_value
from flopcast.roofline.gpu.fit.host_calibration import fine_tune_host_plans, plan_streams
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.calls.counts import weighted
from studies.calls.optimizers import HIGH, LOW, slope
from studies.command import parser_of
from studies.imports import ROOT

ROWS = ROOT / "reports" / "nvidia-h200" / "fine-tune" / "hosts-2"


def main() -> None:
    parser_of(__spec__, __doc__).parse_args()
    seconds = {row["key"]: warm_value(cast(FitRow, row)) for row in records.read(ROWS).rows}
    plans = {plan.model: plan for plan in fine_tune_host_plans()}
    plain, recomputing = plans["qwen3-lora"], plans["qwen3-lora-checkpoint"]
    calls = {plan.model: of_a_layer(plan_streams(plan, "cuda")) for plan in (plain, recomputing)}
    own, hooked = (slope(seconds, plan, "forward") / calls[plan.model]["forward"] for plan in (plain, recomputing))
    backward = slope(seconds, plain, "backward") / calls[plain.model]["backward"]
    counts = calls[recomputing.model]
    left = slope(seconds, recomputing, "backward") - backward * counts["backward"]
    print(f"a call of the forward: {own * 1e6:.1f} us")
    print(f"a call of a forward that checkpoints: {hooked * 1e6:.1f} us, {hooked / own:.2f} of that")
    again = left / counts["recomputed"]
    print(f"a call that the backward recomputes: {again * 1e6:.1f} us, {again / own:.2f} of it")


def of_a_layer(streams: dict[int, Stream]) -> dict[str, float]:
    """Calls that the deeper model makes more, views by their weight: of the forward, of the backward itself, and of
    what it recomputes."""
    found = dict.fromkeys(("forward", "backward", "recomputed"), 0.0)
    for depth, sign in ((HIGH, 1), (LOW, -1)):
        for op in streams[depth].ops:
            name = "recomputed" if op.is_recomputed else op.phase
            if name in found:
                found[name] += sign * weighted([op])
    return found


if __name__ == "__main__":
    main()
