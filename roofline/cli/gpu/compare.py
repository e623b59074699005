"""`flopcast compare`: compares two profiles, or two folders of measurements. Exit code 3 where something regressed."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Exit, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson

REGRESSED = 3


def compare(
    a: Annotated[str, Argument(help="Before: a folder of `flopcast bench`, a profile file or a known GPU.")],
    b: Annotated[str, Argument(help="After, or another GPU: a folder, a profile file or a known GPU.")],
    tolerance: Annotated[
        float, Option(help="Share by which a class may become slower before it counts as regressed.")
    ] = 0.03,
    as_json: AsJson = False,
) -> None:
    """Says what got faster and what slower from A to B, by class and beyond noise. Exit 3 where something regressed."""
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.validation import compare as comparing
    from flopcast.roofline.validation.compare import step_changes
    from flopcast.roofline.validation.compare_sides import side_of
    from flopcast.roofline.views.terminal import console
    from flopcast.roofline.views.terminal.validation import print_comparison

    if not 0 <= tolerance < 10:
        raise UsageError(f"--tolerance is {tolerance:g}: valid is a share from 0 on, such as 0.03 for 3%")
    with progress("comparing"):
        sides = side_of(a), side_of(b)
        found = comparing.compare(*sides, tolerance)
        one, two = (side.profile for side in sides)
        steps = step_changes(one, two) if one is not None and two is not None else []
    if as_json:
        emit({**found.to_json(), "steps": [step.to_json() for step in steps]})
    else:
        print_comparison(found, steps)
    if found.regressed:
        names = "; ".join(change.group for change in found.regressed)
        word = "regressed" if found.of_one_kind else "slower on the other GPU"
        console.say(f"{word} beyond {tolerance:.1%}: {names}")
        raise Exit(REGRESSED)
