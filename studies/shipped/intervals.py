"""Remakes the spreads of steps that intervals are made of, from real steps.

python -m studies.shipped.intervals DIR [--gpu PROFILE]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import log, sqrt
from pathlib import Path
from typing import Any, cast

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.step.uncertainty import FILE, Spreads, spreads
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.validation.step_plans import INTERVALS
from studies.command import parser_of

LEAST_STEPS = 4  # of fewer a spread is not estimated: the default stays

# Two-sided 90% quantile of Student's t by degrees of freedom (any table of it): a spread estimated from few steps is
# itself uncertain, which widens the interval.
_STUDENT = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812, 12: 1.782, 15: 1.753, 20: 1.725,
            30: 1.697}  # fmt: skip


# --- where the spreads come from ------------------------------------------------------------------------


def estimate(rows: Iterable[StepComparison], source: Mapping[str, Any] | None = None) -> Spreads:
    """Spreads from real steps beside their forecasts, of which those of group "intervals" alone count.

    A class's: root mean square of its log errors. What is common: of the log errors of the whole device time, less what
    the classes explain if they were independent. The host's: of the step's, where the host bounds it, less what the
    samples beside it lie apart (`host_sigma`), and not below the default: a handful of such differences may come out as
    nothing. Each widened by Student's quantile for the number of steps; where fewer than `LEAST_STEPS` have it, the
    default stays.
    """
    done = [row for row in rows if row.plan.group == INTERVALS and row.status == "ok" and row.device.measured]
    plain = Spreads()
    classes: dict[str, float] = {}
    for group in GROUPS:
        found = _spread(_logs(row.classes[group] for row in done))
        if found is not None:
            classes[group] = found
    excess = []
    for row in done:
        shares = {group: (part.measured or 0.0) / (row.device.measured or 1.0) for group, part in row.classes.items()}
        explained = sum((shares[group] * classes.get(group, plain.default)) ** 2 for group in GROUPS)
        excess.append(log(1 + (row.device.error or 0.0)) ** 2 - explained)
    common = plain.common
    if len(excess) >= LEAST_STEPS:
        common = sqrt(max(0.0, sum(excess) / len(excess))) * _student(len(excess))
    by_device = [row for row in done if not row.is_host_bound and row.step.error is not None]
    beyond = _spread([step - device for row in by_device for step, device in [_logs([row.step, row.device])]])
    known = spreads().host_same_run  # with it the rows were forecast
    left = [
        step**2 - max(0.0, (row.host_sigma or known) ** 2 - known**2)
        for row in done
        if row.is_host_bound
        for step in _logs([row.step])
    ]
    host = None
    if len(left) >= LEAST_STEPS:
        host = max(plain.host_same_run, sqrt(max(0.0, sum(left) / len(left))) * _student(len(left)))
    return Spreads(
        classes={group: round(value, 4) for group, value in classes.items()},
        common=round(common, 4),
        beyond=plain.beyond if beyond is None else round(beyond, 4),
        host_same_run=plain.host_same_run if host is None else round(host, 4),
        source={**(source or {}), "steps": [row.plan.name for row in done]},
    )


def _logs(parts: Iterable[Part]) -> list[float]:
    """Errors of those that have one, as logarithms of forecast over measured."""
    return [log(1 + part.error) for part in parts if part.error is not None]


def _spread(errors: Sequence[float]) -> float | None:
    """Root mean square about zero: the forecast is not corrected by what is found here."""
    if len(errors) < LEAST_STEPS:
        return None
    return sqrt(sum(error**2 for error in errors) / len(errors)) * _student(len(errors))


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
