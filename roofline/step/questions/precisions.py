"""Sets the precisions in which torch trains side by side: what a whole step gains in time, memory and dollars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.side_by_side import Side, side
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

# From the slowest on; fp8 is refused with the reason, which belongs in the comparison.
COMPARED = ("fp32", "tf32", "autocast-fp16", "autocast-bf16", "bf16", "fp8")


def precisions_of(step: PricedStep, stream_of: Callable[[Run], Stream | None]) -> tuple[Side, ...]:
    """Returns the step in each precision, all else as it is; one that cannot be forecast is kept with the reason."""

    def forecast(precision: str) -> Forecast | None:
        if precision == step.run.precision:
            return step.forecast()
        run = replace(step.run, precision=precision)
        run.check()
        stream = stream_of(run)
        return None if stream is None else replace(step, stream=stream, run=run).forecast()

    return tuple(side(precision, partial(forecast, precision)) for precision in COMPARED)
