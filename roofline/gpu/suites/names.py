"""The names of the suites that ship."""

from __future__ import annotations

from flopcast.errors import UsageError

HOST = "host"  # what launches cost, alone: a suite of no cases
SUITES = ("quick", "standard", "full", "fused", "attention")


def check_suite(suite: str, valid: tuple[str, ...] = SUITES) -> None:
    if suite not in valid:
        raise UsageError(f"suite {suite!r}: valid are {', '.join(valid)}")


# Of the fused kernels alone (`suite_fused`): traced patched, and nothing but these calls measured.
FUSED = "fused"
# Of Triton's attention alone (`suites_attention.triton_cases`), drawn, not traced.
ATTENTION = "attention"
OF_TRITON = (FUSED, ATTENTION)
