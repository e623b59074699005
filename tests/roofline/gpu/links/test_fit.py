"""The rows of `bench --suite collectives` become a link's profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import DataError
from flopcast.microbench.records.records import MACHINE, MEASUREMENTS
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.roofline.gpu.links import fit, library
from flopcast.roofline.gpu.links.choice import Regime
from flopcast.roofline.gpu.links.library import find_interconnect

GROUP = {"gpus": 2, "nodes": 1, "nccl": "2.28.9", "nvls": False, "settings": {"NCCL_NVLS_ENABLE": "0"}}


def _row(key: str, **fields: Any) -> dict[str, Any]:
    return {
        **EMPTY_FIELDS, **GROUP, "schema": 1, "method": 1, "machine": "m", "key": key, "backend": "nccl",
        "cache": "hot", "time": "2026-11-23T01:00:00Z", **fields,
    }  # fmt: skip


def _collective(kind: str, size: int, seconds: float) -> dict[str, Any]:
    samples = [seconds * (1 + 0.01 * i) for i in range(-5, 6)]
    return _row(f"collective/{kind}/bf16/2x1/{size}", value=seconds, seconds=seconds, bytes=size, samples=samples)


ROWS = [
    _row("regime/all_reduce/bf16/2x1/1024", bytes=1024, algorithm="RING", protocol="LL", channels=1),
    _row("regime/all_reduce/bf16/2x1/268435456", bytes=2**28, algorithm="RING", protocol="SIMPLE", channels=24),
    _row("regime/all_gather/bf16/2x1/268435456", bytes=2**28, algorithm="NVLS_TREE", protocol="SIMPLE", channels=16),
    _collective("all_reduce", 1024, 9e-6),
    _collective("all_reduce", 2**28, 1e-3),
    _collective("all_gather", 2**28, 5e-4),
    _row("collective/all_reduce/fp32/2x1/1073741824", status="oom", reason="no room", bytes=2**30),
    _row("launch_cost/all_reduce/2x1", value=2.1e-5, seconds=2.1e-5, captured_seconds=4e-7),
    _row("beside/copy-256MiB/all_reduce/2x1", value=3e-4, alone_seconds=2e-4, collective_alone_seconds=1e-3,
         collective_beside_seconds=1.2e-3, collective_bytes=2**28),
    _row("copy/to_host/pinned/2x1/1048576", value=5e-5, bytes=2**20),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "user_links", lambda: tmp_path / "kept")
    monkeypatch.setattr(fit, "user_links", lambda: tmp_path / "kept")
    out = tmp_path / "out"
    out.mkdir()
    machine = {
        "schema": 1,
        "machine": "m",
        "device": {"type": "cuda", "name": "NVIDIA A100-SXM4-80GB"},
        "stack": {"torch": "2.11"},
    }
    (out / MACHINE).write_text(json.dumps(machine))
    return out


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / MEASUREMENTS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_become_a_profile_that_the_gpus_name_finds(folder: Path) -> None:
    _write(folder, ROWS)
    profile = fit.fit_links(folder)
    fit.save(profile, folder / "link.json")
    assert (profile.name, profile.link, profile.nccl, profile.nvls) == (
        "nvidia-a100-80gb-sxm",
        "nvlink3",
        "2.28.9",
        False,
    )
    assert len(profile.points) == 3
    (cost,) = profile.host
    assert (cost.python_seconds, cost.captured_seconds) == (2.1e-5, 4e-7)
    (copy,) = profile.copies
    assert (copy.direction, copy.pinned) == ("to_host", True)
    (shared,) = profile.beside
    assert (shared.work, shared.channels, shared.beside_seconds) == ("copy-256MiB", 24, 3e-4)
    found = find_interconnect("a100-80gb-sxm").time("all_reduce", 2**28, 2)
    assert (found.seconds, found.basis, found.blocks) == (1e-3, "measured", 24)
    assert found.regime == Regime("ring", "Simple")
    assert 0.02 < found.sigma < 0.06
    gathered = find_interconnect("a100-80gb-sxm").time("all_gather", 2**28, 2)
    assert (gathered.regime, gathered.blocks) == (None, 16)  # no law knows NVLSTree


def test_a_folder_without_times_is_refused(folder: Path) -> None:
    _write(folder, ROWS[:3])
    with pytest.raises(DataError, match="no collective that was timed"):
        fit.fit_links(folder)
