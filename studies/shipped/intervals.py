"""Remakes the spreads of steps that intervals are made of, from real steps.

python -m studies.shipped.intervals DIR [--gpu PROFILE]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import log, sqrt
from pathlib import Path
from typing import Any, NamedTuple, cast

from scipy.optimize import minimize_scalar

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.step.uncertainty import FILE, Spreads, spreads
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS
from studies.command import parser_of

TINY = 1e-5  # of a deviation
LEAST_STEPS = 4  # of fewer a spread is not estimated: the default stays

# Two-sided 90% quantile of Student's t by degrees of freedom (any table of it): a spread estimated from few steps is
# itself uncertain, which widens the interval.
_STUDENT = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812, 12: 1.782, 15: 1.753, 20: 1.725,
            30: 1.697}  # fmt: skip


# --- where the spreads come from ------------------------------------------------------------------------


def estimate(rows: Iterable[StepComparison], source: Mapping[str, Any] | None = None) -> Spreads:
    """Spreads from real steps beside their forecasts, of which those of group "intervals" alone count.

    A class's: of its log errors beyond what the errors of its shapes explain (`own_sigmas`), each step counting by the
    square of the class's share of it, as it does in the variance of a step. What is common: of the log errors of the
    whole device time, beyond what shapes and classes explain if they were independent. The host's: of the step's, where
    the host bounds it, beyond what the samples beside it lie apart (`host_sigma`), and not below the default: a handful
    of such differences may come out as nothing. Each widened by Student's quantile for the number of steps, which
    several modes may have run; where fewer than `LEAST_STEPS` have it, the default stays.
    """
    ran = [row for row in rows if row.plan.group == INTERVALS and row.status == "ok"]
    done = [row for row in ran if row.device.measured]
    modes = len({row.plan.mode for row in ran}) or 1
    plain = Spreads()
    classes: dict[str, float] = {}
    for group in GROUPS:
        found = _spread([_Off(_logs([row.classes[group]])[0], row.own_sigmas.get(group, 0.0), _share(row, group) ** 2)
                         for row in done if row.classes[group].error is not None], modes)  # fmt: skip
        if found is not None:
            classes[group] = found
    whole = [
        _Off(_logs([row.device])[0], sqrt(sum(
            _share(row, group) ** 2 * (classes.get(group, plain.default) ** 2 + row.own_sigmas.get(group, 0.0) ** 2)
            for group in GROUPS
        )))
        for row in done
        if row.device.error is not None
    ]  # fmt: skip
    common = _spread(whole, modes)
    by_device = [row for row in done if not row.is_host_bound and row.step.error is not None]
    beyond = _spread(
        [_Off(step - device) for row in by_device for step, device in [_logs([row.step, row.device])]], modes
    )
    # with it the rows were forecast
    host = _spread([
        _Off(step, sqrt(max(0.0, (row.host_sigma or 0.0) ** 2 - spreads(row.plan.mode).host_same_run ** 2)))
        for row in ran
        if row.is_host_bound
        for step in _logs([row.step])
    ], modes)  # fmt: skip
    return Spreads(
        classes={group: round(value, 4) for group, value in classes.items()},
        common=plain.common if common is None else round(common, 4),
        beyond=plain.beyond if beyond is None else round(beyond, 4),
        host_same_run=plain.host_same_run if host is None else round(max(plain.host_same_run, host), 4),
        source={**(source or {}), "steps": [row.plan.name for row in ran]},
    )


class _Off(NamedTuple):
    """A log error, the deviation that is known to be in it, and how much it counts."""

    error: float
    known: float = 0.0
    weight: float = 1.0


def _share(row: StepComparison, group: str) -> float:
    return (row.classes[group].measured or 0.0) / (row.device.measured or 1.0)


def _logs(parts: Iterable[Part]) -> list[float]:
    """Errors of those that have one, as logarithms of forecast over measured."""
    return [log(1 + part.error) for part in parts if part.error is not None]


def _spread(found: Sequence[_Off], modes: int = 1) -> float | None:
    """The deviation about zero beyond what is known: the likeliest if errors are normal, which without anything known
    is their root mean square. The forecast is not corrected by what is found here."""
    if len(found) < LEAST_STEPS * modes or not sum(off.weight for off in found):
        return None

    def unlikely(spread: float) -> float:
        variances = [spread**2 + off.known**2 + TINY**2 for off in found]
        return sum(
            off.weight * (log(variance) + off.error**2 / variance)
            for off, variance in zip(found, variances, strict=True)
        )

    largest = max(abs(off.error) for off in found) + TINY
    likeliest = minimize_scalar(unlikely, bounds=(0.0, largest), method="bounded", options={"xatol": TINY})
    return float(likeliest.x) * _student(len(found) // modes)


def _student(n: int) -> float:
    """How much wider than the normal distribution's an interval has to be when its spread comes from n values."""
    known = max((degrees for degrees in _STUDENT if degrees <= n), default=min(_STUDENT))
    return _STUDENT[known] / Z_90


def main(arguments: Sequence[str] | None = None) -> None:
    """Remakes the shipped file from a folder of steps."""
    from flopcast.microbench.records import records
    from flopcast.microbench.records.rows import StepRow
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.validation.compare_steps import compare

    parser = parser_of(__spec__, __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args(arguments)
    profile = find_profile(given.gpu)
    measured = [
        row
        for row in records.read(given.folder).rows
        if row["key"].startswith("host/") or cast(StepRow, row).get("plan", {}).get("group") == INTERVALS
    ]
    machine = records.read_machine(given.folder)
    days = sorted(row["time"][:10] for row in measured)
    found = estimate(
        compare(measured, profile, stack=machine["stack"]),
        {"gpu": profile.gpu, "card": machine["device"].get("uuid"), "date": days[-1] if days else ""},
    )
    given.out.write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(given.out, json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
