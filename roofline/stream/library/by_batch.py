"""Streams of many batches from two traces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
from flopcast.roofline.stream.model.models import depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES, rebatched
from flopcast.roofline.stream.ops.to_depth import at_depth


def stream_of(config: Mapping[str, Any], traced: Traced) -> Stream:
    """As `get_stream`, without a trace for every batch: at hand, else from the two of BATCHES.

    Raises UsageError as `get_stream` does.
    """
    if traced.batch in (1, *BATCHES) or is_at_hand(config, traced):
        return get_stream(config, traced)
    depth = depth_of(config)
    is_folded = depth >= 2 and len(set(config.get("layer_types") or ())) <= 1
    base = with_depth(config, FOLDED_DEPTH) if is_folded else dict(config)
    try:
        found = _folded(canonical_json(base), traced)
        return found if found.depth == depth or not is_folded else at_depth(found, depth)
    except ValueError:  # NotLinear, or a stack that does not fold
        return get_stream(config, traced)


@lru_cache(maxsize=64)
def _folded(config: str, traced: Traced) -> Stream:
    return rebatched(*_pair(config, replace(traced, batch=0)), traced.batch)


@lru_cache(maxsize=32)
def _pair(config: str, traced: Traced) -> tuple[Stream, Stream]:
    low, high = (get_stream(json.loads(config), replace(traced, batch=batch)) for batch in BATCHES)
    return low, high
