"""Bounds of accuracy that the tests hold, a little above what the committed steps and kernels show today.

    python -m studies.evidence.bounds            # writes tests/studies/evidence/bounds.toml
    python -m studies.evidence.bounds --check    # says what is out of bounds, as the tests do

Run it after a change that means to change forecasts, and read the difference: every bound that rises is a forecast that
became worse.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS
from flopcast.roofline.validation.summary import Errors, summary
from studies.command import parser_of
from studies.evidence.kernels import Held, held_out
from studies.evidence.steps import H200, OF_HOSTS, PROJECTED, Rows, compared, judged, sets_of

REPORTS = Path("reports")
BOUNDS = Path("tests/studies/evidence/bounds.toml")
# Held-out rows of one card, and of one that ran the fused kernels alone: those of eleven take six times as long.
KERNELS = f"{H200}/measurements/gpu0", f"{H200}/measurements/gpu10"
# Room above today's figures: a share of them, but of a median at least so many points.
ROOM, LEAST_POINTS = 0.12, 0.05
LOST = 1  # intervals that may come to miss in a set of steps
LOST_SHARE = 0.02  # of those of a kind of kernels
LEAST_ROWS = 15  # of a kind of kernels to be bounded

HEAD = """# Bounds of accuracy in percent, held by test_accuracy.py: {room:.0%} above what steps and kernels show.
# `python -m studies.evidence.bounds` writes this file. A part of a step has [median, worst] of its |error|. inside: so
# many of a set's 90% intervals hold at least; width: their mean, at most, over the forecast. step, inside and width are
# with the host that ran beside the steps; those ending in _default_host with the shipped one.
"""

Figures = Mapping[str, Sequence[float]]


def in_suite(machine: str, plan: StepPlan) -> bool:
    """Whether the tests forecast a step: all but three modules, whose trace takes as long as twenty forecasts, those of
    the projection, all of whose surfaces would be solved anew, and those of two machines, which were run for their
    hosts and are of thirty further models."""
    return not plan.module and machine not in (PROJECTED, *OF_HOSTS) and plan.group != INTERVALS


def figures(rows: Sequence[StepComparison]) -> dict[str, list[float]]:
    """What is bounded of a set of steps, in percent and in numbers of steps."""
    found = summary("", rows)
    parts = {name: errors for name, errors in found.parts.items() if name != "host" and errors.median is not None}
    shipped = parts.pop("profile_host_step")
    return {
        "steps": [len(rows)],
        **{{"peak": "memory"}.get(name, name): _percent(errors) for name, errors in parts.items()},
        "device_inside": [_inside(row.device for row in rows)],
        "device_width": [_width([row.device for row in rows])],
        "inside": [_inside(row.step for row in rows)],
        "width": [_width([row.step for row in rows])],
        "step_default_host": _percent(shipped),
        "inside_default_host": [_inside(row.profile_host_step for row in rows)],
        "width_default_host": [_width([row.profile_host_step for row in rows])],
    }


def _percent(errors: Errors) -> list[float]:
    return [100 * (errors.median or 0.0), 100 * (errors.worst or 0.0)]


def _inside(parts: Iterable[Part]) -> int:
    return sum(bool(part.is_within) for part in parts)


def _width(parts: Sequence[Part]) -> float:
    widths = [part.interval_width for part in parts if part.interval_width is not None]
    return 100 * sum(widths) / len(widths) if widths else 0.0


def kernel_figures(held: Mapping[str, Held]) -> dict[str, list[float]]:
    """Of each kind of held-out kernels: median and 90th percentile of |error|, share inside, mean width; in percent."""
    return {
        name: [100 * one.median, 100 * one.p90, 100 * one.coverage, 100 * one.width]
        for name, one in held.items()
        if one.n >= LEAST_ROWS
    }


def with_room(found: Figures) -> dict[str, list[float]]:
    """Bounds of a set of steps."""
    bounds = {}
    for name, values in found.items():
        if name == "steps":
            bounds[name] = list(values)
        elif "inside" in name:
            bounds[name] = [max(values[0] - LOST, 0)]
        else:
            bounds[name] = [_above(value) for value in values]
    return bounds


def _above(value: float) -> float:
    return ceil(100 * max(value * (1 + ROOM), value + LEAST_POINTS)) / 100


def kernels_with_room(found: Figures) -> dict[str, list[float]]:
    return {
        name: [_above(middle), _above(high), round(inside - 100 * LOST_SHARE, 1), _above(width)]
        for name, (middle, high, inside, width) in found.items()
    }


def broken(found: Figures, bounds: Figures) -> list[str]:
    """What is out of bounds in a set of steps, in words; a bound without a figure, or the reverse, is."""
    said = [f"{name}: bounded or found, not both" for name in found.keys() ^ bounds.keys()]
    if found.get("steps") != bounds.get("steps"):  # what bounds a step decides its set: the other figures are of others
        return [f"steps: {found.get('steps')} in this set, {bounds.get('steps')} bounded"]
    for name in found.keys() & bounds.keys():
        pairs = list(zip(found[name], bounds[name], strict=True))
        if name == "steps":
            continue
        if "inside" in name:
            said += [f"{name}: {value} intervals hold, at least {bound} did" for value, bound in pairs if value < bound]
        else:
            said += [f"{name}: {value:.2f}%, at most {bound}% is allowed" for value, bound in pairs if value > bound]
    return sorted(said)


def broken_kernels(found: Figures, bounds: Figures) -> list[str]:
    """The same of kinds of held-out kernels."""
    said = [f"{name}: bounded or found, not both" for name in found.keys() ^ bounds.keys()]
    for name in found.keys() & bounds.keys():
        (*errors, inside, width), (*most, least, widest) = found[name], bounds[name]
        over = [(value, bound) for value, bound in zip((*errors, width), (*most, widest), strict=True) if value > bound]
        said += [f"{name}: {value:.2f}%, at most {bound}% is allowed" for value, bound in over]
        if inside < least:
            said.append(f"{name}: {inside:.1f}% of the intervals hold, at least {least}% did")
    return sorted(said)


def all_figures(reports: Path) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """Of every set of steps, and of every kind of held-out kernels."""
    return step_figures(compared(reports, in_suite, with_projected=False)), held_out_figures(reports)


def held_out_figures(reports: Path) -> dict[str, list[float]]:
    """Of every kind of held-out kernels of the cards of KERNELS, which have none in common."""
    profile = find_profile(H200)
    return kernel_figures({name: held for card in KERNELS for name, held in held_out(reports / card, profile).items()})


def step_figures(by_machine: Mapping[str, Rows]) -> dict[str, dict[str, list[float]]]:
    """Of every set of those steps that the tests forecast."""
    return {name: figures(rows) for name, rows in sets_of(judged(by_machine, in_suite)).items()}


def read_bounds(path: Path = BOUNDS) -> dict[str, dict[str, list[float]]]:
    """Of every set of steps by its name, and of held-out kernels as "kernels"."""
    with path.open("rb") as file:
        found = tomllib.load(file)
    return {
        name: {key: value if isinstance(value, list) else [value] for key, value in bounds.items()}
        for name, bounds in found.items()
    }


def out_of_bounds(reports: Path, bounds: Mapping[str, Figures]) -> dict[str, list[str]]:
    """What is out of bounds, by set."""
    steps, kernels = all_figures(reports)
    found = {name: broken(values, bounds[name]) for name, values in steps.items()}
    return {
        name: said for name, said in {**found, "kernels": broken_kernels(kernels, bounds["kernels"])}.items() if said
    }


def main() -> int:
    """Writes the bounds, or checks them: exit code 1 where one does not hold."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=BOUNDS)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        wrong = out_of_bounds(REPORTS, read_bounds(given.out))
        print("\n".join(f"{name}: {text}" for name, said in wrong.items() for text in said))
        return 1 if wrong else 0
    write(*all_figures(REPORTS), given.out)
    print(f"wrote {given.out}")
    return 0


def write(steps: Mapping[str, Figures], kernels: Figures, path: Path = BOUNDS) -> None:
    """Writes the bounds of these figures."""
    lines = [HEAD.format(room=ROOM)]
    for name, found in steps.items():
        lines.append(f'["{name}"]')
        lines += [f"{key} = {_toml(values)}" for key, values in with_room(found).items()]
        lines.append("")
    lines.append(
        "# Held-out kernels: [median, 90th percentile of |error|, share of 90% intervals at least, mean width]."
    )
    lines.append("[kernels]")
    lines += [f'"{key}" = {_toml(values)}' for key, values in kernels_with_room(kernels).items()]
    path.write_text("\n".join(lines) + "\n")


def _toml(values: Sequence[float]) -> str:
    numbers = [f"{value:g}" for value in values]
    return numbers[0] if len(numbers) == 1 else f"[{', '.join(numbers)}]"


if __name__ == "__main__":
    sys.exit(main())
