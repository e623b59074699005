"""Remakes the committed pages of the measured GPUs, and the index over them.

    python -m studies.shipped.pages                 all, below reports/
    python -m studies.shipped.pages nvidia-h200     one of them

A page shows the profile that ships, as `flopcast report --gpu GPU` does, with the rows that it was fitted to and the
real steps of that GPU, forecast by what Triton's operators cost the host when these ran, as in docs/accuracy.md. The
curves of compiled steps need the ladder compiled before, by `flopcast cost --all-modes` for the GPUs compared and the
page's own: about ten minutes of processor time. (`flopcast report --measurements DIR` fits the rows anew, which takes
minutes for those of eleven cards.)
"""

from __future__ import annotations

from pathlib import Path

from flopcast.microbench.recipe.settings import MODES
from flopcast.progress import progress
from flopcast.roofline.cli.gpu.report import standard_gpus_of_all
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.cases import case_of
from flopcast.roofline.gpu.fit.quality import FitReport, quality_report
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.validation.compare_steps import compare_runs
from flopcast.roofline.views.page import assemble
from flopcast.roofline.views.page import index as page_index
from flopcast.roofline.views.terminal.console import warn
from studies.command import parser_of
from studies.shipped.hosts import launching_anew

REPORTS = Path("reports")
MEASURED = ("nvidia-h200", "nvidia-h100-sxm")


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("gpus", nargs="*", help="the GPUs whose pages are remade (default: all)")
    options = parser.parse_args()
    for gpu in options.gpus or MEASURED:
        folder = REPORTS / gpu
        profile = find_profile(gpu)
        eager = assemble.curves(profile)
        if len(assemble.modes(profile, eager)) < len(MODES):
            names = ",".join(curve.gpu for curve in eager)
            parser.error(
                f"the page of {gpu} would lack its curves of compiled steps, which were not compiled on this machine: "
                f"run `flopcast cost --all-modes --gpus {names}` first"
            )
        with progress(gpu):
            rows = read_folder(folder / "measurements").rows
            compared = compare_runs(folder / "steps", launching_anew(profile), warn=warn)
            page = assemble.build_report(profile, quality_of(profile, rows), folder, measured=rows, compared=compared)
        print(f"wrote {page.relative_to(REPORTS)}")
    page_index.write(REPORTS, standard_gpus_of_all())


def quality_of(profile: Profile, rows: list[FitRow]) -> FitReport:
    """How well the profile fits the rows that were held out of it."""
    gap = profile.ceiling("graph_gap", 0.0)
    shaped = [row for row in rows if row["status"] == "ok" and row.get("shape")]
    cases = [case for row in shaped if (case := case_of(row, gap, [])) is not None]
    held = [case for case in cases if case.is_held_out]
    return quality_report(profile, [], held, sum(case.is_throttled for case in cases), {}, [])


if __name__ == "__main__":
    main()
