"""Fits the surfaces of one kind of kernel anew and puts them in a shipped profile, which keeps all others as they are.

    python -m studies.shipped.surfaces FOLDER --gpu nvidia-h200 [--op-class gemm] [--only TEXT] [--drop]
    python -m studies.shipped.surfaces FOLDER --gpu nvidia-h200 --launches

For kernels that were changed and measured again, when nothing else was: fitting a whole profile anew moves every
forecast. FOLDER holds the measurements of the GPU's cards, or of those of which rows are of the present kernels;
others are left out. A surface of which fewer rows were measured again than it has stays. `--only`: so do those
without this text in their name, whatever else is asked for. `--drop`: the surfaces are only taken out, where nothing
measured the present kernels on this GPU; what is lent from another GPU then takes their place
(`gpu/projection/complete.py`). `--launches`: the times of no surface move; points of which the folder has a row get
the number of kernels that it launched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.cases import Limits, case_of
from flopcast.roofline.gpu.fit.rows import with_launches
from flopcast.roofline.gpu.fit.surfaces import fit_surfaces
from flopcast.roofline.gpu.profile.profile import PROFILES, Profile
from studies.command import parser_of
from studies.shipped.added import of_rows


def refitted(profile: Profile, folder: Path, backend: str, op_class: str, only: str = "") -> tuple[Profile, list[str]]:
    """The profile with this kind's surfaces, those whose name has `only`, fitted to the folder's rows, and warnings. Of
    rows held out none counts."""
    found = read_folder(folder)
    warnings = list(found.warnings)
    gap = profile.ceiling("graph_gap", 0.0)
    rows = [
        row
        for row in found.rows
        if row["status"] == "ok" and row.get("shape") and row.get("backend", "torch") == backend
    ]
    cases = [case for row in rows if (case := case_of(row, gap, warnings)) is not None and only in str(case.surface)]
    peaks = {dtype: number.value for dtype, number in profile.peaks.items()}
    surfaces, _ = fit_surfaces(
        [case for case in cases if not case.is_held_out and case.work.op_class == op_class],
        Limits(profile.device, peaks, profile.ceilings),
    )
    for key, known in profile.surfaces.items():
        if (key.backend, key.op_class) == (backend, op_class) and only in str(key):
            count = len(surfaces[key].seconds) if key in surfaces else 0
            if count < len(known.seconds):
                surfaces[key] = known
                warnings.append(
                    f"{key}: {count} rows for {len(known.seconds)}, it stays as it is until all are measured"
                )
    surfaces = {**profile.surfaces, **with_launches(surfaces, cases)}  # in the order that they had
    return replace(profile, surfaces=surfaces), warnings


def counted(profile: Profile, folder: Path) -> Profile:
    """The profile with how many kernels the calls in a folder launched, in place of means by kind."""
    cases = of_rows(read_folder(folder).rows, profile)
    return replace(profile, surfaces=with_launches(profile.surfaces, cases), launch_counts={})


def without(profile: Profile, backend: str, op_class: str, only: str = "") -> Profile:
    gone = {key for key in profile.surfaces if (key.backend, key.op_class) == (backend, op_class) and only in str(key)}
    return replace(profile, surfaces={key: kept for key, kept in profile.surfaces.items() if key not in gone})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--op-class", default="gemm")
    parser.add_argument("--only", default="", help="text in the names of the surfaces meant, e.g. bwd/causal/bf16/d128")
    parser.add_argument("--drop", action="store_true")
    parser.add_argument("--launches", action="store_true")
    options = parser.parse_args(arguments)
    path = PROFILES / f"{options.gpu}.json.gz"
    profile = Profile.load(path)
    warnings: list[str] = []
    if options.drop:
        made = without(profile, options.backend, options.op_class, options.only)
    elif options.launches:
        made = counted(profile, options.folder)
    else:
        made, warnings = refitted(profile, options.folder, options.backend, options.op_class, options.only)
    made.save(path)
    print(*warnings, sep="\n", file=sys.stderr)
    for key, surface in made.surfaces.items():
        if (key.backend, key.op_class) == (options.backend, options.op_class):
            print(f"{key}: {len(surface.seconds)} rows, {surface.params}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
