"""Answers `flopcast widths` for a user's module, whose factory takes a parameter `width`: one trace per width, since
only the factory knows which of its sizes follow from it."""

from __future__ import annotations

from collections.abc import Callable

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.model.models import MOST_SIZE
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths.answer import Answer
from flopcast.roofline.widths.measured_rules import measured_rules
from flopcast.roofline.widths.penalties import ALIGNED, TOLERATED, Point, penalties_of, point_of, rule_of

WIDTH = "width"  # the parameter of the factory, and the name of the axis
# Beside the nearest multiple of 64: both sides of it for the classes between which the multiple to keep is decided (a
# size just above it begins a tile that it hardly uses), one for the others.
BESIDE = (-1, 1, -2, 4, -8, 8, 16, -32)


def widths_near(own: int) -> list[int]:
    """Returns twelve sizes at most: the own one, the nearest three multiples of 64, and sizes between for each largest
    power of two up to 32 that divides them."""
    center = max(2 * ALIGNED, round(own / ALIGNED) * ALIGNED)
    return sorted({own, *(center + step for step in (-ALIGNED, 0, ALIGNED, *BESIDE))})


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
    own = _own_width(module, around)
    device = profile.device["type"]
    values = widths_near(own)
    points: dict[int, Point] = {}
    refused: dict[int, str] = {}
    asked = run
    with no_garbage_collection():
        for done, value in enumerate([own, *(value for value in values if value != own)]):
            try:
                stream = module.resized(width=value).stream(run, device)
            except UsageError as fault:
                if value == own:
                    raise UsageError(f"at width {own}{' with --forward-only' * forward}: {fault}") from fault
                refused[value] = str(fault)
            else:
                traced = run_of_stream(stream, run)
                asked = traced if value == own else asked
                config = {"module": module.name, WIDTH: value, "unit": stream.meta["unit"]}
                points[value] = point_of(WIDTH, value, config, stream, traced, profile, host=host, forward=forward)
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
        measured=[rule for rule in measured_rules(profile) if rule.layout == "all"],
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
