"""Adds kinds of kernel that were measured later, on one card, to the shipped profile of the H200; others stay.

    python -m studies.shipped.added

The rows are those of `bench --suite inference`, `fine-tune`, `images`, `precisions` and `fp8` and of
`studies.bitsandbytes_kernels`, in reports/nvidia-h200/*/kernels and kernels-2. A kind is added where the profile has
none of it, or none that is nearly as large: a cache of keys and values is a hundred times what a rotary embedding puts
together by the same kernel. A kind of which there are more later rows than the profile has points is fitted anew:
products in fp32 and tf32 had 15 points a layout. So are all kinds of TOLD_APART, of which those go that no row is of
any more. Each is fitted to the cards' rows of the kind too, where there are any. All other kinds stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from flopcast.microbench.records import kernel_sources, records
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.cases import Case, Limits, case_of
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.fit.rows import with_launches
from flopcast.roofline.gpu.fit.surfaces import fit_surfaces
from flopcast.roofline.gpu.library.profiles import SOURCE
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.variants import ConvVariant, KernelKind, SurfaceKey
from studies.command import parser_of
from studies.imports import ROOT

REPORT = ROOT / "reports" / SOURCE
# Not taken: norms, whose kernels the law of bytes tells within a factor only (51% at the 90th percentile of nine held
# out), and hot lists of tensors, of which the profile has none, so that all others would be estimated by them.
LEFT_OUT = (("other", "cold"), ("other", "hot"), ("optimizer", "hot"))
LARGER = 8.0  # how many times the most bytes of a kind's points, for the later rows to take its place
TOLD_APART = ("cat", "conv")  # classes whose kinds are others than when the cards' profile was fitted
LEAST = 2  # points of a surface: one tells no size from another
SUITES = ("inference", "fine-tune", "images", "precisions", "fp8", "bitsandbytes")
RUNS = ("kernels", "kernels-2")
PROFILE = DATA / "profiles" / f"{SOURCE}.json.gz"


def main() -> None:
    """Writes the profile with what was added, and says how far the rows that were held out are off."""
    parser_of(__spec__, __doc__).parse_args()
    profile = without_added(Profile.load(PROFILE))
    cases = [case for suite in SUITES for run in RUNS for case in cases_of(REPORT / suite / run, profile)]
    fitted = [case for case in cases if not case.is_held_out]
    earlier = of_rows(read_folder(REPORT / "measurements").rows, profile)
    found = with_added(profile, fitted, [case for case in earlier if not case.is_held_out])
    found.save(PROFILE)
    added = {SurfaceKey.parse(name) for name in found.provenance["added"]}
    print(f"{len(added)} surfaces added or replaced, of {len(found.surfaces)}; held out:")
    print("  replaced:", ", ".join(sorted({str(key.kind) for key in added & set(profile.surfaces)})))
    for name, (count, median, ninth) in held_out(found, [case for case in cases if case.surface in added]).items():
        print(f"  {name:10} {count:4} rows, {median:.1%} at the median, {ninth:.1%} at the 90th percentile")


def cases_of(folder: Path, profile: Profile) -> list[Case]:
    """The cases of a folder of measurements, of today's kernels alone, or none where there is no such folder."""
    if not records.file_in(folder).is_file():
        return []
    present, _ = kernel_sources.present(records.read(folder).latest())
    return of_rows(cast(Sequence[FitRow], present), profile)


def of_rows(rows: Iterable[FitRow], profile: Profile) -> list[Case]:
    """The cases of measured kernels that are sound."""
    warnings: list[str] = []
    gap = profile.ceiling("graph_gap", 0.0)
    sound = (row for row in rows if row["status"] == "ok" and row.get("shape"))
    return [case for row in sound if (case := case_of(row, gap, warnings)) is not None]


def without_added(profile: Profile) -> Profile:
    """The profile as it was fitted to the cards' measurements."""
    provenance = dict(profile.provenance)
    added = {SurfaceKey.parse(name) for name in provenance.pop("added", ())}
    return replace(
        profile,
        surfaces={key: found for key, found in profile.surfaces.items() if key not in added},
        provenance=provenance,
    )


def outnumbered(profile: Profile, cases: Sequence[Case]) -> set[KernelKind]:
    """The kinds of which the profile has a surface with fewer points than there are cases."""
    later = Counter(case.surface for case in cases)
    return {key.kind for key, surface in profile.surfaces.items() if len(surface.bytes) < later[key]}


def with_added(profile: Profile, cases: Sequence[Case], earlier: Sequence[Case] = ()) -> Profile:
    """The profile with surfaces of the kinds that only the cases have, or have at sizes far beyond, or more of; they
    are fitted to cases of `earlier` too."""
    peaks = {dtype: number.value for dtype, number in profile.peaks.items()}
    largest: dict[KernelKind, float] = defaultdict(float)
    for case in cases:
        largest[case.surface.kind] = max(largest[case.surface.kind], case.work.bytes)
    known = {key.kind for key, surface in profile.surfaces.items() if LARGER * max(surface.bytes) >= largest[key.kind]}
    anew = largest.keys() - (known - outnumbered(profile, cases))
    anew |= {case.surface.kind for case in earlier if case.work.op_class in TOLD_APART}
    stale = {key.kind for key in profile.surfaces if earlier and key.op_class in TOLD_APART} - anew
    taken = [case for case in (*cases, *earlier) if case.surface.kind in anew and not _is_left_out(case)]
    points = Counter(case.surface for case in taken)
    taken = [case for case in taken if points[case.surface] >= LEAST]
    fitted, _ = fit_surfaces(taken, Limits(profile.device, peaks, profile.ceilings), profile.surfaces)
    fitted = with_launches(fitted, taken)
    gone = stale | {key.kind for key in fitted}
    return replace(
        profile,
        surfaces={**{key: surface for key, surface in profile.surfaces.items() if key.kind not in gone}, **fitted},
        provenance={**profile.provenance, "added": sorted(map(str, fitted))},
    )


def _is_left_out(case: Case) -> bool:
    return (case.work.op_class, case.cache) in LEFT_OUT and "dequantize" not in str(case.surface.kind)


def held_out(profile: Profile, cases: Sequence[Case]) -> Mapping[str, tuple[int, float, float]]:
    """Of the cases that were held out, by class: how many, and the median and 90th percentile of their errors."""
    import numpy as np

    errors: dict[str, list[float]] = defaultdict(list)
    held = [case for case in cases if case.is_held_out]
    estimates = profile.estimate([(case.work, case.backend, case.cache) for case in held])
    for case, estimate in zip(held, estimates, strict=True):
        name = "decode" if case.work.op_class == "attention" else case.work.op_class
        if isinstance(case.work.variant, ConvVariant) and case.work.variant.form == "depthwise":
            name = "depthwise"
        errors[name].append(abs(estimate.seconds / case.seconds - 1))
    return {
        name: (len(own), float(np.median(own)), float(np.quantile(own, 0.9))) for name, own in sorted(errors.items())
    }


if __name__ == "__main__":
    main()
