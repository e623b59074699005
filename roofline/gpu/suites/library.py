"""The suites that ship: reading and writing them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from flopcast.errors import UsageError
from flopcast.kernels.shapes import shape_from_json, shape_to_json
from flopcast.roofline.gpu.suites.build import PLANS
from flopcast.roofline.gpu.suites.names import OF_TRITON
from flopcast.roofline.gpu.suites.suite import SuiteCase


def load(name: str) -> list[SuiteCase]:
    """The cases of a shipped suite. Raises UsageError for an unknown name."""
    path = shipped_path(name)
    if not path.is_file():
        raise UsageError(f"unknown suite {name!r}: valid are {', '.join(sorted([*PLANS, *OF_TRITON]))}")
    record = json.loads(gzip.decompress(path.read_bytes()))
    shapes = [shape_from_json(shape) for shape in record["shapes"]]
    return [SuiteCase(shapes[i], backend, cache, role) for i, backend, cache, role in record["cases"]]


def save(cases: Sequence[SuiteCase], path: Path, sources: Mapping[str, Sequence[str]] | None = None) -> None:
    """Writes a suite; the same cases give the same bytes. `sources`: the steps traced for it, by role."""
    shapes = list(dict.fromkeys(case.shape for case in cases))
    index = {shape: i for i, shape in enumerate(shapes)}
    record = {
        "sources": dict(sources or {}),
        "shapes": [shape_to_json(shape) for shape in shapes],
        "cases": [[index[case.shape], case.backend, case.cache, case.role] for case in cases],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), 9, mtime=0))


def shipped_path(name: str) -> Path:
    return Path(str(files("flopcast.roofline") / "data" / "suites" / f"{name}.json.gz"))
