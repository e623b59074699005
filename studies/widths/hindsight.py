"""The penalties that today's profile and laws say of all sets of widths, beside the same real steps: hindsight.

    python -m studies.widths.hindsight --out reports/nvidia-h200/widths-hindsight.csv

No step of a set was ever fitted, but the laws of products were written with earlier sets in sight, so that this says
what a user gets today and is no blind test: those are the tables of forecasts committed before a set ran
(`check.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.profile.profile import Profile
from studies.command import parser_of
from studies.markdown import table
from studies.widths.check import KINDS, Row, forecasts, judged, measured_of, rows_in, shapes_of, summary
from studies.widths.sets import SETS, CheckSet

COLUMNS = (
    "set", "neighbourhood", "axis", "value", "multiple", "below", "above", "profile", "penalty_forecast", "penalty_low",
    "penalty_high", "penalty_measured", "penalty_spread", "penalty_error", "gemm_error", "time_error", "right_sign",
    "within_interval",
)  # fmt: skip


def hindsight(profile: Profile, steps: Path, sets: Mapping[int, CheckSet] = SETS) -> dict[int, list[Row]]:
    """The unaligned sizes of each set that was run, forecast now and judged; `steps` has a folder a set, by number.

    Raises UsageError where there is none, DataError as `records.read` does."""
    found = {}
    for number, chosen in sorted(sets.items()):
        folder = steps / str(number)
        if not folder.is_dir():
            continue
        runs = [measured_of(rows) for rows in rows_in(folder)]
        rows = judged(forecasts(chosen, profile, shapes_of(runs)), runs)
        found[number] = [row for row in rows if row["penalty_forecast"] is not None]
    if not found:
        raise UsageError(f"{steps} has no steps of a set: valid are folders {', '.join(map(str, sets))} in it")
    return found


def by_set(found: Mapping[int, Sequence[Row]]) -> str:
    """A Markdown table: how many came within 1.5 points, and the median and worst difference, by set and kind."""
    made = []
    for name, rows in (*found.items(), ("all", [row for mine in found.values() for row in mine])):
        of = summary(rows)
        cells = [_cell(of), *(_cell(of["kinds"].get(kind, {})) for kind in KINDS)]
        counts = [f"{round(of[share] * of['judged'])} of {of['judged']}" for share in ("right_sign", "within_interval")]
        made.append([str(name), *cells, *counts])
    return table(("set", "all", *KINDS, "right sign", "in 90% interval"), made)


def _cell(of: Mapping[str, Any]) -> str:
    if not of.get("judged"):
        return "-"
    near = round(of["within_goal"] * of["judged"])
    return f"{near} of {of['judged']} ({100 * of['median_points']:.2g}; {100 * of['worst_points']:.2g})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes every unaligned size of all sets; prints how many came within 1.5 points (median; worst, points)."""
    from flopcast.roofline.gpu.library.profiles import find_profile

    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--gpu", default="nvidia-h200", help="or a profile's file")
    parser.add_argument("--steps", type=Path, default=Path("reports/nvidia-h200/width-steps"), help="a folder a set")
    parser.add_argument("--out", type=Path, help="CSV of every size")
    given = parser.parse_args(arguments)
    found = hindsight(find_profile(given.gpu), given.steps)
    if given.out is not None:
        rows = [{name: row[name] for name in COLUMNS} for mine in found.values() for row in mine]
        write_rows(given.out, COLUMNS, rows)
    print(by_set(found))


if __name__ == "__main__":
    main()
