"""Compares launches that were found without a GPU with those of real compiled steps.

    python -m studies.compiled.gate reports/nvidia-h200/compiled-steps FOUND

Both folders hold CASE.code.gz, inductor's output code as `studies.compiled.record` keeps it. Prints for each case of
both the launches and bytes by kind, and the products and attention calls without a counterpart. Exits 1 if a case is
further than `--tolerance` away.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flopcast.errors import FlopcastError
from flopcast.roofline.stream.compiled.compare import Comparison, Side, compare
from studies.command import parser_of
from studies.compiled.recorded import CODE, cases_of, graphs_of
from studies.markdown import table

SHOWN_CALLS = 8


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("expected", type=Path, help="folder of real steps")
    parser.add_argument("found", type=Path, help="folder of the same cases without a GPU")
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative, of launches and of bytes")
    options = parser.parse_args()
    cases = {folder: set(cases_of(folder, CODE)) for folder in (options.expected, options.found)}
    both = sorted(cases[options.expected] & cases[options.found])
    if not both:
        parser.error(f"no case is in both folders: {options.expected} has {len(cases[options.expected])} *{CODE}, "
                     f"{options.found} {len(cases[options.found])}")  # fmt: skip
    try:
        compared = {case: compare(graphs_of(options.expected, case), graphs_of(options.found, case)) for case in both}
    except FlopcastError as error:
        parser.error(str(error))
    for case, comparison in compared.items():
        print(f"\n## {case}\n\n{details(comparison)}")
    print(f"\n## All\n\n{summary(compared)}")
    missing = sorted(cases[options.expected] - cases[options.found])
    if missing:
        print(f"\nNot found: {', '.join(missing)}")
    sys.exit(0 if all(comparison.within(options.tolerance) for comparison in compared.values()) else 1)


def details(comparison: Comparison) -> str:
    """The table of a case by kind, and the calls that differ."""
    rows = [
        [row.kind, *_both(row.expected, row.found), _percent(row.launches_error), _percent(row.bytes_error)]
        for row in comparison.kinds
    ]
    text = table(["kind", "launches, real", "found", "GB, real", "found", "launches", "bytes"], rows)
    calls = [f"- {row.call}: {row.expected} real, {row.found} found" for row in comparison.calls]
    more = [f"- and {len(calls) - SHOWN_CALLS} more"] if len(calls) > SHOWN_CALLS else []
    told = f"{comparison.n_calls - comparison.unmatched} of {comparison.n_calls} library calls are the same."
    return "\n".join([text, "", told, *calls[:SHOWN_CALLS], *more])


def summary(compared: dict[str, Comparison]) -> str:
    rows = []
    for case, comparison in compared.items():
        total = comparison.total
        errors = [_percent(total.launches_error), _percent(total.bytes_error)]
        rows.append([case, *_both(total.expected, total.found), *errors, f"{comparison.unmatched}"])
    heads = ["case", "launches, real", "found", "GB, real", "found", "launches", "bytes", "calls unmatched"]
    return table(heads, rows)


def _both(expected: Side, found: Side) -> list[str]:
    return [str(expected.launches), str(found.launches), f"{expected.bytes / 1e9:.3f}", f"{found.bytes / 1e9:.3f}"]


def _percent(error: float) -> str:
    return f"{error * 100:+.1f}%"


if __name__ == "__main__":
    main()
