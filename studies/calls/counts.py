"""How many calls of the host operations are."""

from __future__ import annotations

from collections.abc import Iterable

from flopcast.roofline.gpu.profile.host import VIEW_WEIGHT
from flopcast.roofline.stream.ops.op_stream import Op


def weighted(ops: Iterable[Op]) -> float:
    """Calls of these operations, a view as the part of one that it costs. What asks the device nothing is none."""
    return sum(VIEW_WEIGHT if op.kind == "view" else 1.0 for op in ops if op.kind != "host")
