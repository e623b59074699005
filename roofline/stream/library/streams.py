"""Where op streams come from without tracing them again: the wheel, the user's cache, at last the tracer.

A stream of a model with identical layers is stored folded, so that one file serves every depth of at least
three layers. Only a stream found nowhere imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from flopcast.errors import DataError, UsageError
from flopcast.files import cache_folder
from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.lowering.fused import check_fused
from flopcast.roofline.stream.model.models import check_config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops import to_micro_batches
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.ops.to_depth import at_depth

# Raised when the tracer gives another stream for the same model: what was cached before is traced again.
TRACER = 2


Trace = Callable[[Mapping[str, Any], Traced], Stream]

# Run options that are no part of the key at these values.
_UNSAID = {"accumulate": 1, "checkpoint": "none", "fused": "none"}
# Fields of a config.json that do not change what is launched.
_IRRELEVANT = {
    "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "rope_theta", "rope_parameters", "rms_norm_eps",
    "max_position_embeddings", "hidden_act", "attention_bias", "use_cache", "name",
}  # fmt: skip
_KEPT_IF = {"hidden_act": "silu", "attention_bias": False}  # but only at these values
# What a Qwen3 config.json says besides, at the values that are the model's own defaults.
_QWEN3_DEFAULTS = {"attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
                   "rope_scaling": None, "max_window_layers": 28}  # fmt: skip


def stream_key(config: Mapping[str, Any], traced: Traced) -> str:
    """Hash of what the stream depends on, versions left out; the same for configs that launch the same."""
    kept = {
        name: value
        for name, value in config.items()
        if name not in _IRRELEVANT or (name in _KEPT_IF and value != _KEPT_IF[name])
    }
    if kept.get("model_type") == "qwen3":
        kept = {k: v for k, v in kept.items() if k not in _QWEN3_DEFAULTS or v != _QWEN3_DEFAULTS[k]}
        if set(kept.get("layer_types") or ()) == {"full_attention"}:
            del kept["layer_types"]
    run = {name: value for name, value in asdict(traced).items() if value != _UNSAID.get(name)}
    return hashlib.sha256(canonical_json([kept, run]).encode()).hexdigest()[:20]


def shipped_path(key: str) -> Path:
    return Path(str(files("flopcast.roofline") / "data" / "streams" / f"{key}.json.gz"))


@cache  # looking a version up reads files: 5 ms, and each row of a sweep asks
def _versions() -> str:
    return f"tracer{TRACER}-" + "-".join(
        f"{name}{metadata.version(name)}" for name in ("torch", "transformers")
    ).replace("+", "_")


def get_stream(config: Mapping[str, Any], traced: Traced, trace: Trace | None = None) -> Stream:
    """The op stream of `config` at its own depth: shipped, cached, or traced (and then cached) by `trace`, else by
    `trace_now`.

    Raises UsageError for sizes that cannot be, and when transformers refuses the config.
    """
    check_config(config)
    check_fused(config, traced.fused)
    positions = config.get("n_positions")
    if isinstance(positions, int) and traced.seq > positions:
        raise UsageError(f"seq is {traced.seq}: this model has {positions} positions (n_positions), use at most that")
    if traced.accumulate > to_micro_batches.TRACED:
        some = get_stream(config, as_traced(traced), trace)
        with contextlib.suppress(to_micro_batches.NotAlike):
            return to_micro_batches.with_micro_batches(some, traced.accumulate)
    depth = depth_of(config)
    # A single layer is first and last at once; layers of several types are not one layer repeated.
    if depth < 2 or len(set(config.get("layer_types") or ())) > 1:
        return _find_or_trace(config, traced, trace)
    folded = _find_or_trace(with_depth(config, FOLDED_DEPTH), traced, trace)
    if folded.depth == depth:
        return folded
    if folded.depth == FOLDED_DEPTH:
        return at_depth(folded, depth)
    return _find_or_trace(config, traced, trace)  # layers differ from one another: nothing to fold


def as_traced(traced: Traced) -> Traced:
    """With as many micro-batches as are traced for it."""
    return replace(traced, accumulate=min(traced.accumulate, to_micro_batches.TRACED))


def is_at_hand(config: Mapping[str, Any], traced: Traced) -> bool:
    """Whether `get_stream` finds the stream, folded or at the config's own depth, without tracing it."""
    traced = as_traced(traced)
    folded = with_depth(config, FOLDED_DEPTH) if depth_of(config) >= 2 else config
    keys = {stream_key(folded, traced), stream_key(config, traced)}
    return any(shipped_path(key).is_file() or _cached_path(key).is_file() for key in keys)


def _cached_path(key: str) -> Path:
    return cache_folder("streams") / _versions() / f"{key}.json.gz"


def _find_or_trace(config: Mapping[str, Any], traced: Traced, trace: Trace | None) -> Stream:
    key = stream_key(config, traced)
    shipped = shipped_path(key)
    if shipped.is_file():
        return streams.load(shipped)
    cached = _cached_path(key)
    if cached.is_file():
        with contextlib.suppress(DataError):  # torn, or of another flopcast: trace it again
            return streams.load(cached)
    stream = (trace or trace_now)(config, traced)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not the answer
        streams.save(stream, cached)
    return stream


def trace_now(config: Mapping[str, Any], traced: Traced) -> Stream:
    """Traces, importing torch and transformers. Raises UsageError when transformers refuses the config."""
    with no_garbage_collection():
        from flopcast.roofline.stream.tracer.trace import trace

        try:
            return trace(config, **asdict(traced))
        except Exception as fault:  # transformers, its config classes and torch each have errors of their own
            kind = config.get("model_type")
            said = " ".join(str(fault).split())[:300] or type(fault).__name__
            raise UsageError(
                f"config with model_type {kind!r} cannot be traced: {said}; "
                "valid is the config.json of a causal language model that transformers can build"
            ) from fault
