"""Stores op streams as files, keyed by what they depend on: those in the wheel, and those this user traced before."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from flopcast.errors import DataError
from flopcast.files import cache_folder
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.stream.model.models import Config, has_windows
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Stream, load, save

# Increased when the tracer gives another stream for the same model: streams cached before are then traced again.
TRACER = 6

# As TRACER, of the streams of compiled steps; also when what is counted of a generated kernel changes.
READER = 12

# Of how a step is run, what its key always says; of the rest it says what is not at its default.
_ALWAYS = ("batch", "seq", "precision", "optimizer", "device")
# Fields of a config.json that do not change what is launched.
_IRRELEVANT = {
    "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "rope_theta", "rope_parameters", "rms_norm_eps",
    "max_position_embeddings", "hidden_act", "attention_bias", "use_cache", "name",
}  # fmt: skip
_KEPT_IF = {"hidden_act": "silu", "attention_bias": False}  # these fields are irrelevant only at these values
# Further fields of a Qwen3 config.json, at the model's own defaults: left out of the key at these values.
_QWEN3_DEFAULTS = {"attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
                   "rope_scaling": None, "max_window_layers": 28}  # fmt: skip


def stream_key(config: Config, traced: Traced) -> str:
    """Returns a hash of what the stream depends on, except versions; equal for configs that launch the same kernels."""
    kept = relevant(config)
    run = {name: value for name, value in vars(traced).items() if name in _ALWAYS or value != getattr(Traced, name)}
    if not has_windows(config, traced.seq):
        run.pop("attention", None)
    if traced.mode != "eager":
        run["reader"] = READER
    return hashlib.sha256(canonical_json([kept, run]).encode()).hexdigest()[:20]


def relevant(config: Config) -> Config:
    """Returns the fields of a config that say what is launched."""
    kept = {
        name: value
        for name, value in config.items()
        if name not in _IRRELEVANT or (name in _KEPT_IF and value != _KEPT_IF[name])
    }
    if kept.get("model_type") == "qwen3":
        kept = {k: v for k, v in kept.items() if k not in _QWEN3_DEFAULTS or v != _QWEN3_DEFAULTS[k]}
        if set(kept.get("layer_types") or ()) == {"full_attention"}:
            del kept["layer_types"]
    return kept


def shipped_path(key: str) -> Path:
    """Returns the path at which the wheel has the stream of a key, if it has one."""
    return DATA / "streams" / f"{key}.json.gz"


def cached_path(key: str) -> Path:
    """Returns the path at which this user's cache has the stream of a key, if it has one, for the versions of the
    tracer and the libraries in use."""
    return cache_folder("streams") / f"tracer{TRACER}-{versions('torch', 'transformers')}" / f"{key}.json.gz"


@cache  # looking up a version reads files, which takes 5 ms, for every row of a sweep
def versions(*packages: str) -> str:
    """Names the installed versions of packages, as part of a path: "torch2.11.0_cu130-triton3.6.0". One that is not
    installed has none."""
    found = []
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name}{metadata.version(name)}")
    return "-".join(found).replace("+", "_")


def is_stored(config: Config, traced: Traced) -> bool:
    """Whether the wheel or the cache has exactly this stream."""
    key = stream_key(config, traced)
    return shipped_path(key).is_file() or cached_path(key).is_file()


def find_stored(config: Config, traced: Traced) -> Stream | None:
    """Returns exactly this stream from the wheel or the cache; None where neither has it.

    Raises DataError for a stream of the wheel that cannot be read.
    """
    key = stream_key(config, traced)
    if (shipped := shipped_path(key)).is_file():
        return load(shipped)
    if (cached := cached_path(key)).is_file():
        with suppress(DataError):  # truncated, or written by another flopcast: traced again
            return load(cached)
    return None


def store(stream: Stream, config: Config, traced: Traced) -> None:
    """Writes a stream to the cache. A failure costs only time: the stream is then traced again."""
    with suppress(OSError):
        save(stream, cached_path(stream_key(config, traced)))
