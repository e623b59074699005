"""Op streams as files, by what they depend on: those in the wheel, and those that this user has traced before."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

from flopcast.errors import DataError
from flopcast.files import cache_folder
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Stream, load, save

# Raised when the tracer gives another stream for the same model: what was cached before is traced again.
TRACER = 2

# Run options that are left out of the key at these values.
_DEFAULTS = {"accumulate": 1, "checkpoint": "none", "fused": "none"}
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


def stream_key(config: Config, traced: Traced) -> str:
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
    run = {name: value for name, value in asdict(traced).items() if value != _DEFAULTS.get(name)}
    return hashlib.sha256(canonical_json([kept, run]).encode()).hexdigest()[:20]


def shipped_path(key: str) -> Path:
    """Where the wheel has the stream of a key, if it does."""
    return DATA / "streams" / f"{key}.json.gz"


def cached_path(key: str) -> Path:
    """Where this user's cache has the stream of a key, if it does: of these versions of the tracer and of libraries."""
    return cache_folder("streams") / _versions() / f"{key}.json.gz"


@cache  # looking a version up reads files: 5 ms, and each row of a sweep asks
def _versions() -> str:
    return f"tracer{TRACER}-" + "-".join(
        f"{name}{metadata.version(name)}" for name in ("torch", "transformers")
    ).replace("+", "_")


def is_stored(config: Config, traced: Traced) -> bool:
    """Whether the wheel or the cache has this very stream."""
    key = stream_key(config, traced)
    return shipped_path(key).is_file() or cached_path(key).is_file()


def find_stored(config: Config, traced: Traced) -> Stream | None:
    """This very stream, from the wheel or the cache; None where neither has it.

    Raises DataError for a stream of the wheel that cannot be read.
    """
    key = stream_key(config, traced)
    if (shipped := shipped_path(key)).is_file():
        return load(shipped)
    if (cached := cached_path(key)).is_file():
        with suppress(DataError):  # torn, or of another flopcast: it is traced again
            return load(cached)
    return None


def store(stream: Stream, config: Config, traced: Traced) -> None:
    """Keeps a stream in the cache. One that cannot be written costs time, not the answer."""
    with suppress(OSError):
        save(stream, cached_path(stream_key(config, traced)))
