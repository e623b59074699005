"""Streams of many widths from one trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flopcast.errors import UsageError
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
from flopcast.roofline.stream.model.models import Config, check_config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.ops.to_depth import at_depth
from flopcast.roofline.stream.ops.to_width import NotDimensional, _primes, dimensions, redimensioned, with_dimensions


def reference_of(config: Mapping[str, Any], traced: Traced) -> Config:
    """The config that is traced for `config`: folded depth, primes for dimensions. Raises NotDimensional."""
    sizes = dimensions(config)
    kinds = set(config.get("layer_types") or ())
    if depth_of(config) < 1 or len(kinds) > 1:
        raise NotDimensional("layers that do not fold")
    depth = FOLDED_DEPTH if depth_of(config) > 1 else 1  # a single layer is first and last at once
    return with_depth(with_dimensions(config, _primes(sizes, traced, str(config["model_type"]))), depth)


def stream_of(config: Mapping[str, Any], traced: Traced) -> Stream:
    """As `get_stream`, with one trace for all dimensions: at hand, else made of the reference, else traced.

    Raises UsageError as `get_stream` does.
    """
    check_config(config)
    if is_at_hand(config, traced):
        return get_stream(config, traced)
    try:
        found = redimensioned(_reference(canonical_json(reference_of(config, traced)), traced), config)
    except (NotDimensional, UsageError):  # a reference that cannot be traced says nothing about the config
        return get_stream(config, traced)
    return found if found.depth == depth_of(config) else at_depth(found, depth_of(config))


@lru_cache(maxsize=16)
def _reference(config: str, traced: Traced) -> Stream:
    return get_stream(json.loads(config), traced)
