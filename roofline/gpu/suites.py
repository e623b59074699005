"""Reads and writes suites: sets of shapes to measure.

Each shipped suite is a gzipped JSON file in `data/suites`; `studies/suites` makes them from its plans, so that
measuring needs no tracing. Every case has a role: the profile is fitted to "fit" cases; "holdout" cases only check it,
and come from models of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from flopcast import decode, files
from flopcast.bounds import Count, Valid
from flopcast.errors import UsageError
from flopcast.kernels.shapes import Shape, shape_from_json, shape_to_json
from flopcast.microbench.records.row_shapes import Shape as FileShape
from flopcast.roofline.base.shipped import DATA

HOST = "host"  # only what launches cost: a suite without cases
COLLECTIVES = "collectives"  # what joins a host's GPUs: by all of them together
FUSED = "fused"  # only the fused kernels, from steps traced with them
ATTENTION = "attention"  # only Triton's attention (`studies/suites`): random shapes, not traced
PRODUCTS = "products"  # Triton's products and cuBLAS's, at the same random shapes
BANDS = "bands"  # only Triton's attention with windows and packed documents
FP8 = "fp8"  # products of e4m3 operands, Triton's and torch's, at the same random shapes
OPTIMIZERS = "optimizers"  # only flopcast's AdamW, with clipping and without, over models' lists of parameters
OF_TRITON = (FUSED, ATTENTION, PRODUCTS, BANDS, FP8, OPTIMIZERS)
INFERENCE, FINE_TUNE, IMAGES = "inference", "fine-tune", "images"  # only what these launch beside `standard`
HEADS = "heads"  # torch's attention with heads of 80, 96, 192 and 256 columns, values of 128 for 192, and in fp32
MASKS = "masks"  # torch's attention under a causal mask that is a tensor, as compiled steps have it
PRECISIONS = "precisions"  # products in fp32, tf32 and fp16, and what fp16 and experts in bf16 launch
SUITES = ("quick", "standard", "full", *OF_TRITON, INFERENCE, FINE_TUNE, IMAGES, HEADS, MASKS, PRECISIONS)
HOT_BYTES = 128 * 1024**2  # calls above about twice the largest L2 have no hot operands


@dataclass(frozen=True)
class SuiteCase:
    """A shape to measure with a backend and a cache state ("cold" or "hot"), in the role "fit" or "holdout"."""

    shape: Shape
    backend: str
    cache: str
    role: str


class _Record(TypedDict):
    """A suite as a file holds it: cases name their shape by its place."""

    shapes: Sequence[FileShape]
    cases: Sequence[tuple[Count, str, Literal["cold", "hot"], Literal["fit", "holdout"]]]


def _has_its_shapes(record: _Record) -> bool:
    return max((case[0] for case in record["cases"]), default=-1) < len(record["shapes"])


_WHOLE: Any = Annotated[_Record, Valid(_has_its_shapes, "a suite that holds the shapes of its cases")]


def check_suite(suite: str, valid: tuple[str, ...] = SUITES) -> None:
    """Raises UsageError for a name that is not among the valid ones."""
    if suite not in valid:
        raise UsageError(f"suite {suite!r}: valid are {', '.join(valid)}")


def load(name: str) -> list[SuiteCase]:
    """The cases of a shipped suite. Raises UsageError for an unknown name."""
    path = shipped_path(name)
    if not path.is_file():
        known = sorted(other.name.removesuffix(".json.gz") for other in path.parent.glob("*.json.gz"))
        raise UsageError(f"unknown suite {name!r}: valid are {', '.join(known)}")
    return read(path)


def read(path: Path) -> list[SuiteCase]:
    """The cases of a suite's file. Raises DataError for a file that is none."""
    record: _Record = decode.load(_WHOLE, path, "a suite", hint="`python -m studies.suites` makes one")
    shapes = [shape_from_json(shape) for shape in record["shapes"]]
    return [SuiteCase(shapes[i], backend, cache, role) for i, backend, cache, role in record["cases"]]


def save(cases: Sequence[SuiteCase], path: Path, sources: Mapping[str, Sequence[str]] | None = None) -> None:
    """Writes a suite; the same cases give the same bytes. `sources`: names of the steps traced for it, by role."""
    index = {shape: i for i, shape in enumerate(dict.fromkeys(case.shape for case in cases))}
    record = {
        "sources": dict(sources or {}),
        "shapes": [shape_to_json(shape) for shape in index],
        "cases": [[index[case.shape], case.backend, case.cache, case.role] for case in cases],
    }
    files.write(path, json.dumps(record, separators=(",", ":")))


def shipped_path(name: str) -> Path:
    """The path of the shipped suite of this name."""
    return DATA / "suites" / f"{name}.json.gz"
