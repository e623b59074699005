"""Remakes the shipped suites from the traces of the models that they name.

python -m studies.shipped.suites [NAME]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from flopcast.roofline.gpu.library.profiles import SOURCE as MEASURED_GPU
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.suites import attention as suites_attention
from flopcast.roofline.gpu.suites import calls as suites_calls
from flopcast.roofline.gpu.suites.build import FUSED_SOURCES, PLANS, build, works
from flopcast.roofline.gpu.suites.library import save, shipped_path
from flopcast.roofline.gpu.suites.names import ATTENTION, FUSED, OF_TRITON
from flopcast.roofline.gpu.suites.suite import describe_size, sizes


def main() -> None:
    """Remakes the shipped suites, or those named on the command line."""
    remake(sys.argv[1:] or (*PLANS, *OF_TRITON))


def remake(names: Iterable[str]) -> None:
    """Builds and writes suites, and says how long each takes."""
    profile = find_profile(MEASURED_GPU)
    for name in names:
        if name == FUSED:
            cases = suites_calls.fused_cases(*(works(FUSED_SOURCES[role], "cuda") for role in ("fit", "holdout")))
            labels = {role: [source.label for source in own] for role, own in FUSED_SOURCES.items()}
        elif name == ATTENTION:
            cases, labels = suites_attention.triton_cases(), {}
        else:
            cases, labels = build(PLANS[name]), PLANS[name].labels
        save(cases, shipped_path(name), sources=labels)
        kinds: dict[str, Any] = defaultdict(int)
        for case in cases:
            kinds[f"{type(case.shape).__name__}/{case.backend}/{case.cache}/{case.role}"] += 1
        print(describe_size(name, sizes(cases, profile), profile.gpu))
        print(f"  {dict(kinds)}, {shipped_path(name).stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
