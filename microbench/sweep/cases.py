"""Defines the cases of a sweep and makes the row of a case."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from flopcast.kernels.shapes import Attention, Gemm, Shape, shape_to_json
from flopcast.microbench.records.kernel_sources import kernels_of
from flopcast.microbench.records.rows import EMPTY_FIELDS, Fields, OperationRow, merged, rounded
from flopcast.microbench.timing.timer import Timing


class KernelModule(Protocol):
    """The functions that a module of `kernels` provides for its shapes. `reference` does not change the operands."""

    def operands(self, shape: Any, device: Any, seed: int = 0) -> Sequence[Tensor]: ...
    def prepare(self, shape: Any, backend: str, operands: Any) -> Callable[[], Any]: ...
    def reference(self, operands: Any, shape: Any) -> Any: ...
    def check(self, out: Any, ref: Any, operands: Any, shape: Any) -> tuple[float, float]: ...


def kernel_module(shape: Shape) -> KernelModule:
    """The module that runs this kind of shape, imported when first needed."""
    of_gemm = "fp8_products" if isinstance(shape, Gemm) and shape.dtype == "fp8" else "matmul"
    name = of_gemm if isinstance(shape, Gemm) else "attention" if isinstance(shape, Attention) else "aten"
    module: Any = importlib.import_module(f"flopcast.kernels.{name}")
    return module  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation to measure. Cases of role "holdout" are never used in fitting, but to judge the fit."""

    shape: Shape
    backend: str = "torch"
    cache: str = "cold"
    role: str = "fit"

    @property
    def name(self) -> str:
        return f"{self.shape.key} {self.backend} {self.cache}"


def timing_fields(timing: Timing) -> Fields:
    """A timing as the fields of a row."""
    return {
        "seconds": timing.seconds,
        "samples": rounded(timing.samples),
        "n": len(timing.samples),
        "timer": timing.timer,
        "sets": timing.sets,
        "calls_per_sample": timing.calls_per_sample,
        **timing.reading.as_row(),
    }


def case_row(case: Case, suite: str, fields: Fields) -> OperationRow:
    """A row with every field; what was not measured is None. Rows of Triton's kernels carry their fingerprint."""
    shape = shape_to_json(case.shape)
    kernels = kernels_of(shape, case.backend)
    what = {"key": case.shape.key, "backend": case.backend, "cache": case.cache, "shape": shape}
    why = {"suite": suite, "role": case.role}
    return merged(OperationRow, what, why, {} if kernels is None else {"kernels_of": kernels}, EMPTY_FIELDS, fields)


def finite_or_none(value: float | None) -> float | None:
    """None in place of NaN and infinities, which are not JSON."""
    return value if value is not None and math.isfinite(value) else None
