"""What the experts of a step cost: their total against their active parameters, and an uneven load.

The active parameters alone are a model whose experts all get every token: it does the same FLOPs with the weights,
gradients and optimizer states of the active ones only. What the step costs beyond that is the price of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flopcast.microbench.recipe.settings import EXPERTS
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.side_by_side import Side, side
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

UNEVEN = (2.0, 4.0)  # loads of the fullest expert over the mean that are set beside the step's own

StreamOf = Callable[[Config, Run], Stream | None]  # None: it has to be traced first


def experts_of(step: PricedStep, config: Mapping[str, Any] | None, stream_of: StreamOf) -> tuple[Side, ...]:
    """Returns the step as it is, that of the active parameters alone, and those of uneven loads; none for a model
    without experts, and for a module, whose active experts no config names."""
    field = next((name for name in EXPERTS if (config or {}).get(name)), None)
    active = (config or {}).get("num_experts_per_tok")
    if config is None or field is None or not active or step.run.mode != "eager":
        return ()

    def alone() -> Forecast | None:
        run = replace(step.run, imbalance=1.0)
        stream = stream_of({**config, field: active}, run)
        return None if stream is None else replace(step, stream=stream, run=run).forecast()

    def uneven(imbalance: float) -> Forecast:
        return replace(step, run=replace(step.run, imbalance=imbalance)).forecast()

    whose = "GPU" if step.run.layout.ep > 1 else "expert"
    return (
        Side(name=f"{config[field]} experts, {active} a token", forecast=step.forecast()),
        side(f"only {active}, all of them active", alone),
        *(side(f"fullest {whose} {times:g} x the mean", partial(uneven, times)) for times in UNEVEN),
    )
