"""Every configuration that the choice rules can return compiles for its part, fits it, does not spill."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.kernels.resources import rows_of

# Bytes per thread. A few values kept outside the loops do no harm (causal forward, head_dim 128: 40);
# the Triton tutorial's backward, which is slow, spills 896.
SPILL_LIMIT = 64


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_configurations_fit_the_part(run_script: Callable[..., str]) -> None:
    rows = rows_of("compile_offline.py", run_script)
    kernels = ("matmul_kernel", "forward_kernel", "dkdv_kernel", "dq_kernel")
    seen = {(row["sm"], row["kernel"]) for row in rows}
    assert seen >= {(sm, kernel) for sm in (80, 90) for kernel in kernels}
    assert (89, "forward_kernel") in seen
    assert {(90, "matmul_tma_kernel"), (90, "matmul_fp8_kernel")} <= seen
    for row in rows:
        assert row["spill_bytes"] <= SPILL_LIMIT, row
        assert row["shared_bytes"] <= row["limit_bytes"], row
        assert row["registers"] <= 255, row
        if row["sm"] == 90 and "fp32" not in row["config"]:
            assert row["wgmma"], f"not on Hopper's matrix units: {row}"
