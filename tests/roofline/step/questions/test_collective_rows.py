"""Collectives among the rows of `flopcast kernels`."""

from __future__ import annotations

import pytest

import flopcast
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.questions.kernel_times import kernels


def _row(**cells: str) -> dict[str, str]:
    return {"op": "all_reduce", "bytes": "1048576", "num_gpus": "8", **cells}


def test_a_collective_runs_over_the_gpus_own_link_or_the_one_that_is_named() -> None:
    own, pair, named, far, gemm = kernels(
        [
            _row(),
            _row(num_gpus="2"),
            _row(link="pcie4"),
            _row(nodes="8", network="ethernet-25"),
            {"m": "64", "n": "64", "k": "64"},
        ],
        find_profile("nvidia-h200"),
    )
    assert own["seconds"] == flopcast.collective("all_reduce", 2**20, 8, "H200").seconds
    assert own["seconds_low"] < own["seconds"] < own["seconds_high"]
    assert (own["basis"], pair["basis"]) == ("extrapolated", "measured")  # two H200s were measured
    assert named["seconds"] == flopcast.collective("all_reduce", 2**20, 8, "pcie4").seconds
    assert far["seconds"] > own["seconds"]
    assert gemm["seconds"] > 0


@pytest.mark.parametrize(
    ("cells", "told"),
    [({"bytes": ""}, "bytes is missing"), ({"num_gpus": "1"}, "2 or more"), ({"link": "rope"}, "nvlink4"),
     ({"nodes": "3"}, "divides"), ({"dtype": "int8"}, "bf16"), ({"op": "all_scatter"}, "all_to_all")],
)  # fmt: skip
def test_a_row_that_cannot_be_says_why(cells: dict[str, str], told: str) -> None:
    (found,) = kernels([_row(**cells)], find_profile("nvidia-h200"))
    assert told in found["reason"]
    assert "seconds" not in found
