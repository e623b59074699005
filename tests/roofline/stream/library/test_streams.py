"""A stream is traced once: shipped or cached ones answer without torch, and a cache that fails costs time only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.files import cache_folder
from flopcast.roofline.stream.library import streams
from flopcast.roofline.stream.library.stored import stream_key
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, make_config, n_params, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Stream

RUN = Traced(batch=1, seq=16)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def no_tracing(*_: Any) -> Any:
    raise AssertionError("traced again")


def test_traced_once_for_every_depth(tiny: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = get_stream(tiny, RUN)
    files = list(cache_folder("streams").rglob("*.json.gz"))
    assert len(files) == 1
    assert files[0].is_relative_to(cache)
    assert "torch" in files[0].parent.name
    assert "transformers" in files[0].parent.name
    monkeypatch.setattr(streams, "trace_now", no_tracing)
    assert get_stream(tiny, RUN) == first
    assert get_stream(with_depth(tiny, 7), RUN).depth == 7
    assert get_stream(with_depth(tiny, 2), RUN).depth == 2
    with pytest.raises(AssertionError, match="traced again"):
        get_stream(tiny, Traced(batch=2, seq=16))
    with pytest.raises(AssertionError, match="traced again"):
        get_stream({**tiny, "vocab_size": 1024}, RUN)
    with pytest.raises(AssertionError, match="traced again"):
        get_stream(with_depth(tiny, 1), RUN)  # first and last layer at once: not in the folded stream


@pytest.fixture
def traced_before(tiny: dict[str, Any], traced: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch) -> list[Traced]:
    """Tracing takes no time: it gives the stream that another test traced. Lists what was asked for."""
    stream, asked = traced(tiny), []

    def trace_now(_config: Any, run: Traced) -> Stream:
        asked.append(run)
        return stream

    monkeypatch.setattr(streams, "trace_now", trace_now)
    return asked


def test_a_torn_file_is_traced_again(tiny: dict[str, Any], cache: Path, traced_before: list[Traced]) -> None:
    first = get_stream(tiny, RUN)
    (path,) = cache_folder("streams").rglob(f"{stream_key(tiny, RUN)}.json.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert get_stream(tiny, RUN) == first
    assert path.read_bytes() == whole
    assert get_stream(tiny, RUN) == first
    assert traced_before == [RUN, RUN]


def test_an_unwritable_cache_does_no_harm(tiny: dict[str, Any], cache: Path, traced_before: list[Traced]) -> None:
    (cache / "flopcast").write_text("a file where the folder should be")
    assert get_stream(tiny, RUN).depth == 3
    assert get_stream(tiny, RUN).depth == 3
    assert (cache / "flopcast").is_file()
    assert traced_before == [RUN, RUN]


def test_a_shipped_stream_needs_neither_torch_nor_a_cache(tmp_path: Path) -> None:
    code = """
import sys
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, make_config
from flopcast.roofline.stream.model.run import Traced
small = get_stream(load_config("qwen3-0.6b"), Traced())
ladder = get_stream(make_config(width=512, depth=9), Traced())
print(small.depth, ladder.depth, [m for m in ("torch", "transformers", "pandas", "scipy") if m in sys.modules])
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "28 9 []"
    assert list(tmp_path.iterdir()) == []


def test_what_launches_the_same_has_one_key() -> None:
    config = load_config("qwen3-0.6b")
    key = stream_key(config, RUN)
    # as the hub's config.json and as transformers saves it
    hub = {
        **config, "attention_dropout": 0.0, "bos_token_id": 151643, "max_window_layers": 28, "rope_scaling": None,
        "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "layer_types": ["full_attention"] * 28,
    }  # fmt: skip
    assert stream_key(hub, RUN) == key
    assert stream_key({**config, "rope_theta": 1.0}, RUN) == key
    changes: list[dict[str, Any]] = [
        {"hidden_size": 512}, {"tie_word_embeddings": False}, {"attention_bias": True}, {"hidden_act": "gelu"},
        {"model_type": "llama"}, {"attention_dropout": 0.1}, {"use_sliding_window": True}, {"vocab_size": 512},
        {"layer_types": ["sliding_attention"] * 28},
    ]  # fmt: skip
    keys = [stream_key({**config, **change}, RUN) for change in changes]
    runs = [Traced(batch=1, seq=16, optimizer="adamw-fused"), Traced(batch=1, seq=16, device="cpu"), Traced(batch=1)]
    keys += [stream_key(config, run) for run in runs]
    assert len({key, *keys}) == 1 + len(keys)


def test_a_config_that_transformers_saved(cache: Path) -> None:
    """layer_types has one entry a layer: it is cut when the model is folded."""
    config = make_config(width=64, depth=6, heads=4, kv_heads=2, head_dim=16, vocab=512)
    from transformers import AutoConfig

    saved = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))
    assert len(saved["layer_types"]) == 6
    assert get_stream(saved, RUN).n_params == n_params(config)


def test_layers_of_two_types_are_not_folded(cache: Path) -> None:
    config = {
        "model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 512,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
    }  # fmt: skip
    assert get_stream(config, RUN).depth == 2
    (path,) = cache_folder("streams").rglob("*.json.gz")
    assert path.name.startswith(stream_key(config, RUN))


def test_bad_sizes_are_refused_before_tracing(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "trace_now", no_tracing)
    with pytest.raises(UsageError, match="ffn"):
        get_stream({**tiny, "intermediate_size": 0}, RUN)
    with pytest.raises(UsageError, match="depth"):
        get_stream({**tiny, "num_hidden_layers": "three"}, RUN)
