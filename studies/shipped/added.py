"""Adds kinds of kernel that were measured later, on one card, to the shipped profiles; others stay.

    python -m studies.shipped.added [GPU] [--only KIND ...]

The rows are those of `bench --suite inference`, `fine-tune`, `images`, `precisions`, `fp8`, `optimizers`, `heads` and
`masks`, of `studies.bitsandbytes_kernels` and of `studies.links.copies`, in the folders reports/GPU/*/kernels*. A kind
that the profile has not, of which they have more than the cards, or that is ELSEWHERE, is fitted to both together. So
are all kinds of TOLD_APART, of which those go that no row is of any more. All other kinds stay: what many cards
measured is not moved by few rows of one. `--only pointwise/where` changes the kinds alone whose names begin so.
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
from flopcast.roofline.stream.lowering.conv_1x1 import is_1x1
from flopcast.roofline.stream.lowering.variants import ConvVariant, SurfaceKey
from studies.command import parser_of
from studies.imports import ROOT

# Beginnings of the kinds that are others than when the cards' profile was fitted.
TOLD_APART = ("cat/", "conv/", "pointwise/where|", "pointwise/div|bf16", "pointwise/div_|bf16")
# Of which the later rows are of sizes that the cards' are not: norms of images, copies of activations, and the class of
# what is rare.
ELSEWHERE = ("native_batch_norm", "native_layer_norm", "clone|fp32>fp32|a>a", "clone|bf16>bf16|a>a", "other/")
# Kinds of which hot rows are not taken: lists of tensors, of which the cards' profile has none, so that all others
# would be estimated by them; and products in int4, of which all hot ones have few rows: by them those of 2,048 rows,
# half of whose operands lie in L2, came out a quarter too fast.
LEFT_OUT = ("optimizer", "_weight_int4pack_mm")
# Whose fills take a launch's time and no more: not taken where another suite has larger ones of the kind, since five of
# 1.5 to 410 kB moved the forecast of a fill of 1.2 GB, known from one of 67 MB, from 2.3 to 2.6% too long.
SMALL_FILLS = "images"
LEAST = 2  # points of a surface: one tells no size from another
# By GPU, the suites of which it has later rows.
SUITES = {
    SOURCE: (
        "inference",
        "fine-tune",
        "images",
        "precisions",
        "fp8",
        "optimizers",
        "bitsandbytes",
        "links",
        "heads",
        "masks",
    ),
    "nvidia-h100-sxm": ("heads",),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the profile with what was added, and says how far the rows that were held out are off."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("gpu", nargs="?", default=SOURCE, choices=SUITES, help=f"default: {SOURCE}")
    parser.add_argument("--only", nargs="+", default=[""], metavar="KIND", help="beginnings of the kinds that change")
    options = parser.parse_args(arguments)
    gpu = options.gpu
    report, path = ROOT / "reports" / gpu, DATA / "profiles" / f"{gpu}.json.gz"
    shipped = Profile.load(path)
    profile = without_added(shipped)
    of_suites = {
        suite: [case for folder in sorted((report / suite).glob("kernels*")) for case in cases_of(folder, profile)]
        for suite in SUITES[gpu]
    }
    large = {case.surface.kind for suite, own in of_suites.items() if suite != SMALL_FILLS for case in own}
    cases = [
        case
        for suite, own in of_suites.items()
        for case in own
        if not (suite == SMALL_FILLS and case.work.op_class == "fill" and case.surface.kind in large)
    ]
    fitted = [case for case in cases if not case.is_held_out]
    earlier = of_rows(read_folder(report / "measurements").rows, profile)
    found = with_added(profile, fitted, [case for case in earlier if not case.is_held_out])
    found = merged(shipped, found, tuple(options.only))
    found.save(path)
    added = {SurfaceKey.parse(name) for name in found.provenance["added"]}
    print(f"{len(added)} surfaces added or replaced, of {len(found.surfaces)}; held out:")
    print("  replaced:", ", ".join(sorted({str(key.kind) for key in added & set(profile.surfaces)})))
    for name, (count, median, ninth) in held_out(
        found, [case for case in cases if case.surface in added or is_1x1(case.work.variant)]
    ).items():
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


def with_added(profile: Profile, cases: Sequence[Case], earlier: Sequence[Case] = ()) -> Profile:
    """The profile with the kinds of the cases fitted anew, to those of `earlier` too."""
    peaks = {dtype: number.value for dtype, number in profile.peaks.items()}
    cases = [
        case for case in cases if not (case.cache == "hot" and any(part in str(case.surface) for part in LEFT_OUT))
    ]
    later, known = (Counter(case.surface.kind for case in some) for some in (cases, earlier))
    measured = {key.kind for key in profile.surfaces}
    anew = {
        kind
        for kind, count in later.items()
        if kind not in measured or count > known[kind] or any(part in str(kind) for part in ELSEWHERE)
    }
    anew |= {case.surface.kind for case in earlier if str(case.surface.kind).startswith(TOLD_APART)}
    stale = {key.kind for key in profile.surfaces if earlier and str(key.kind).startswith(TOLD_APART)} - anew
    taken = [case for case in (*cases, *earlier) if case.surface.kind in anew]
    points = Counter(case.surface for case in taken)
    taken = [case for case in taken if points[case.surface] >= LEAST]
    fitted, _ = fit_surfaces(taken, Limits(profile.device, peaks, profile.ceilings), profile.surfaces)
    told = with_launches({**profile.surfaces, **fitted}, taken)  # products of matrices tell those of convolutions
    fitted = {key: told[key] for key in fitted}
    gone = stale | {key.kind for key in fitted}
    return replace(
        profile,
        surfaces={**{key: surface for key, surface in profile.surfaces.items() if key.kind not in gone}, **fitted},
        provenance={**profile.provenance, "added": sorted(map(str, fitted))},
    )


def merged(shipped: Profile, found: Profile, beginnings: tuple[str, ...]) -> Profile:
    """The shipped profile, with the kinds of `found` whose names begin so in place of its own."""
    both = [
        {key: surface for key, surface in one.surfaces.items() if str(key.kind).startswith(beginnings) == is_changed}
        for one, is_changed in ((shipped, False), (found, True))
    ]
    surfaces = both[0] | both[1]
    added = {*shipped.provenance.get("added", ()), *found.provenance["added"]} & set(map(str, surfaces))
    return replace(found, surfaces=surfaces, provenance={**found.provenance, "added": sorted(added)})


def held_out(profile: Profile, cases: Sequence[Case]) -> Mapping[str, tuple[int, float, float]]:
    """Of the cases that were held out, by class: how many, and the median and 90th percentile of their errors."""
    import numpy as np

    errors: dict[str, list[float]] = defaultdict(list)
    held = [case for case in cases if case.is_held_out]
    estimates = profile.estimate([(case.work, case.backend, case.cache) for case in held])
    for case, estimate in zip(held, estimates, strict=True):
        name = "decode" if "decode" in str(case.surface.kind) else case.work.op_class
        if isinstance(case.work.variant, ConvVariant) and case.work.variant.form == "depthwise":
            name = "depthwise"
        errors[name].append(abs(estimate.seconds / case.seconds - 1))
    return {
        name: (len(own), float(np.median(own)), float(np.quantile(own, 0.9))) for name, own in sorted(errors.items())
    }


if __name__ == "__main__":
    main()
