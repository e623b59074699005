"""How long a Triton matmul takes: the cost of the configuration that the kernels pick for its sizes. numpy only.

Which tile, split and kernel a call takes is not learnt but known: from the table of measured choices, and the law for
the rest (kernels/matmul_table.py). Its time is what that law says of it (kernels/matmul_law.py), times a factor, and a
second one where rows do not start at whole 128 bytes.

Of 372 products on an H200, each predicted from the others of its layout: where rows are whole lines (194) 2 to 2.4% off
at the median and 9 to 15% at the 90th percentile, where they are not 3 to 4% and 8 to 13%.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES, Gemm
from flopcast.microbench.records.machine import Device
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.stream.lowering.variants import GemmVariant, Variant

KIND = "tuned"
HOPPER = (9, 0)
# By how much of their own rows that are no whole lines are off (log seconds): they say less of one another.
PARTIAL_NOISE = 0.03
_LINE_ELEMENTS = 64  # of 16 bits: rows of the operands start at whole 128 bytes


def table_of(device: Device) -> int | None:
    """The number of the device's table among those shipped, from 1; 0 where it has none and the rule decides; None
    where the kernels are others, on parts before Hopper. A new table changes the kernels' fingerprint: surfaces are
    fitted anew then."""
    from flopcast.kernels import matmul_table

    if tuple(device.get("capability") or ()) != HOPPER:
        return None
    found = matmul_table.find(str(device.get("name", "")), "")
    return 0 if found is None else matmul_table.tables().index(found) + 1


def is_for(backend: str, variant: Variant) -> bool:
    """Whether a surface holds products of the tensor-memory kernels: of 16 bits, rows of whole 16 bytes."""
    return (
        backend == "triton"
        and isinstance(variant, GemmVariant)
        and not variant.form
        and variant.is_aligned
        and variant.layout in ("nt", "nn", "tn")
        and DTYPE_BYTES.get(variant.dtype) == 2
    )


def log_seconds(variant: GemmVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """log of seconds. features: log2 of m, n and k."""
    found = _costs(variant, params, features)
    return np.asarray(np.log(params["scale"] * found) + params["partial"] * partial(variant, features))


def inputs(variant: GemmVariant, params: Params, features: Array) -> Array:
    """The residual's inputs: the features, whether rows are partial lines, log2 of the cost over the time at peak."""
    m, n, k = features.T
    ideal = 2.0 ** (m + n + k + 1.0) / params["peak"]
    waste = np.log2(_costs(variant, params, features) / ideal).clip(0.0, 4.0)
    return np.column_stack([features, 2.0 * partial(variant, features), 2.0 * waste])


def partial(variant: GemmVariant, features: Array) -> Array:
    """[rows], 1 where rows of an operand, or of the result, are no whole lines of 128 bytes."""
    m, n, k = np.exp2(features.T).round()
    rows = {"nt": (k, n), "nn": (k, n), "tn": (m, n)}[variant.layout]
    return np.asarray(np.any([size % _LINE_ELEMENTS != 0 for size in rows], axis=0), np.float64)


def _costs(variant: GemmVariant, params: Params, features: Array) -> Array:
    sizes = np.exp2(features).round().astype(int).tolist()
    sm_count, table = int(params["sm_count"]), int(params["table"])
    return np.array([_cost(variant, m, n, k, sm_count, table) for m, n, k in sizes])


@lru_cache(maxsize=65536)
def _cost(variant: GemmVariant, m: int, n: int, k: int, sm_count: int, table: int) -> float:
    from flopcast.kernels import matmul_law, matmul_table

    shape = Gemm(m=m, n=n, k=k, dtype=variant.dtype, layout=variant.layout)
    known = matmul_table.tables()[table - 1] if table else None
    config = matmul_table.choose(shape, sm_count, HOPPER, tma=True, table=known)
    return matmul_law.seconds_of(config, shape, sm_count)


LAW = Law(frozenset({"scale", "partial", "sm_count", "peak", "table"}), log_seconds, inputs)
