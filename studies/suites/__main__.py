"""Remakes the shipped suites from the traces of the models that they name.

python -m studies.suites [--keep] [NAME ...]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flopcast.roofline.gpu.library.profiles import SOURCE as MEASURED_GPU
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.suites import (
    ATTENTION,
    BANDS,
    FP8,
    FUSED,
    HEADS,
    MASKS,
    OF_TRITON,
    OPTIMIZERS,
    PRODUCTS,
    load,
    save,
    shipped_path,
)
from studies.command import parser_of
from studies.suites import beside
from studies.suites.attention import banded_cases, head_cases, masked_cases, triton_cases
from studies.suites.build import build, works
from studies.suites.calls import fused_cases, optimizer_cases
from studies.suites.duration import describe_duration, durations
from studies.suites.plans import FUSED_SOURCES, OPTIMIZER_SOURCES, PLANS, labels
from studies.suites.products import fp8_cases, product_cases

TRACED = {FUSED: (FUSED_SOURCES, fused_cases), OPTIMIZERS: (OPTIMIZER_SOURCES, optimizer_cases)}
DRAWN = {
    ATTENTION: triton_cases, BANDS: banded_cases, HEADS: head_cases, MASKS: masked_cases, PRODUCTS: product_cases,
    FP8: fp8_cases,
}  # fmt: skip


def main() -> None:
    """Remakes the shipped suites, or those named on the command line."""
    parser = parser_of(__spec__, __doc__)
    valid = (*PLANS, *OF_TRITON, HEADS, MASKS, *beside.SOURCES)
    parser.add_argument("name", nargs="*", help=f"default: all, {', '.join(valid)}")
    parser.add_argument(
        "--keep", action="store_true", help="keep the shipped cases, and add what is drawn and traced beside them"
    )
    arguments = parser.parse_args()
    names = arguments.name or (tuple(beside.SOURCES) if arguments.keep else valid)
    if unknown := [name for name in names if name not in valid]:
        parser.error(f"unknown suites {', '.join(unknown)}: valid are {', '.join(valid)}")
    if arguments.keep and (others := [name for name in names if name not in beside.SOURCES]):
        parser.error(f"--keep is for {', '.join(beside.SOURCES)}, not {', '.join(others)}")
    remake(names, is_kept=arguments.keep)


def remake(names: Iterable[str], *, is_kept: bool = False) -> None:
    """Builds and writes suites, and says how long each takes. `is_kept`: their traced cases stay as they are shipped,
    which another version of torch or of what is traced would change."""
    profile = find_profile(MEASURED_GPU)
    for name in names:
        if name in TRACED:
            steps, cases_of = TRACED[name]
            cases, sources = cases_of(*(works(own, "cuda") for own in steps.values())), labels(steps)
        elif is_kept:
            beside_them = (*beside.drawn_beside(name), *beside.traced_beside(name))
            cases, sources = beside.distinct_cases([*load(name), *beside_them]), labels(beside.SOURCES[name])
        elif name in beside.SOURCES:
            cases, sources = beside.cases_of(name), labels(beside.SOURCES[name])
        elif name in DRAWN:
            cases, sources = DRAWN[name](), {}
        else:
            cases, sources = build(PLANS[name]), labels(PLANS[name].sources)
        save(cases, shipped_path(name), sources=sources)
        kinds = Counter(f"{type(case.shape).__name__}/{case.backend}/{case.cache}/{case.role}" for case in cases)
        print(describe_duration(name, durations(cases, profile), profile.gpu))
        print(f"  {dict(kinds)}, {shipped_path(name).stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
