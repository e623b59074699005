"""Answers `flopcast widths` for a user's module, whose factory takes a parameter `width`: one trace per width, since
only the factory knows which of its sizes follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.model.models import MOST_SIZE
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths.answer import Answer, check_forward
from flopcast.roofline.widths.measured_rules import measured_rules
from flopcast.roofline.widths.penalties import (
    BESIDE,
    COMPILED,
    TOLERATED,
    Point,
    penalties_of,
    point_of,
    rule_of,
    widths_near,
)

WIDTH = "width"  # the parameter of the factory, and the name of the axis


def answer_of_module(
    module: Module,
    run: Run,
    profile: Profile,
    *,
    around: int | None = None,
    forward: bool = False,
    tolerated: float = TOLERATED,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Answer:
    """Forecasts the module at widths near `around` (default: its factory's own). A width that the factory refuses is
    left out, and `Answer.refused` says why.

    Raises UsageError for a factory without a width, and where `around` itself or all that compares is refused."""
    run.check()
    check_forward(run, forward)
    own = _own_width(module, around)
    device = run.device_of(profile.device)
    is_eager = run.mode == "eager"
    values = widths_near(own, BESIDE if is_eager else COMPILED)
    points: dict[int, Point] = {}
    refused: dict[int, str] = {}
    asked = run
    with no_garbage_collection():
        for done, value in enumerate([own, *(value for value in values if value != own)]):
            try:
                sized = module.resized(width=value)
                stream = sized.stream(run, device)
                eager = None if is_eager else sized.stream(replace(run, mode="eager"), profile.device["type"])
            except UsageError as fault:
                if value == own:
                    raise UsageError(f"at width {own}{' with --forward-only' * forward}: {fault}") from fault
                refused[value] = str(fault)
            else:
                traced = run_of_stream(stream, run)
                asked = traced if value == own else asked
                config = {"module": module.name, WIDTH: value, "unit": stream.meta["unit"]}
                points[value] = point_of(
                    WIDTH, value, config, stream, traced, profile, host=host, forward=forward, eager=eager
                )
            progress(done + 1, len(values))
    found = [points[value] for value in values if value in points]
    penalties = penalties_of(found)
    if not penalties:
        value, why = next(iter(refused.items()))
        raise UsageError(
            f"widths of --module {module.name}: near {own} its factory takes too few to compare; {value} is refused: "
            f"{why}"
        )
    return Answer(
        gpu=profile.gpu, basis=profile.basis, run=asked, forward=forward, center=points[own],
        points={WIDTH: found}, penalties={WIDTH: penalties}, rules={WIDTH: rule_of(WIDTH, penalties, tolerated)},
        heads=[], shapes=[], constraint=None, tolerated=tolerated, refused=refused,
        measured=[rule for rule in measured_rules(profile) if rule.layout == "all" and is_eager],
    )  # fmt: skip


def _own_width(module: Module, around: int | None) -> int:
    if not module.takes(WIDTH):
        raise UsageError(
            f"widths of --module {module.name}: its factory has no parameter `width`; give it one, as in "
            "`def factory(width=1024)`, or compare what it has by `flopcast cost --module`"
        )
    own = module.size(WIDTH) if around is None else around
    if own is None:
        raise UsageError(f"--module {module.name}: its width has no default; give --around with the width to try near")
    if not 1 <= own <= MOST_SIZE:
        raise UsageError(f"--around is {own}: valid is a width of at least 1, at most {MOST_SIZE}")
    return own
