"""Models by width, by name and by file; what cannot be is refused with what can."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.roofline.dollars.plan import pretraining_seq
from flopcast.roofline.stream.model.models import (
    LADDER_WIDTHS,
    check_config,
    context_of,
    depth_for,
    has_windows,
    ladder,
    load_config,
    make_config,
    n_params,
    shipped_names,
    with_depth,
)


def test_depth_laws() -> None:
    """The design's values: printed 4 to 7 layers, ln 6 to 50, qwen3 the nearest published model's."""
    widths = (256, 512, 1024, 2048, 4096)
    assert [depth_for(width) for width in widths] == [4, 4, 5, 6, 7]
    assert [depth_for(width, "ln") for width in widths] == [6, 10, 17, 29, 50]
    assert [depth_for(width, "qwen3") for width in widths] == [28, 28, 28, 28, 36]
    assert depth_for(2560, "qwen3") == 36
    assert depth_for(5000, "qwen3") in (40, 64)
    assert depth_for(16) == 1  # the narrowest that has a layer: 0.77 x 4 - 2.5 = 0.58
    for law in ("printed", "ln"):
        depths = [depth_for(width, law) for width in range(64, 8192, 64)]
        assert depths == sorted(depths)


@pytest.mark.parametrize(
    ("width", "law", "message"),
    [
        (0, "printed", "width is 0"),
        (-256, "qwen3", "width is -256"),
        (8, "printed", "gives 0 layers at width 8.*larger width, or give --depth"),
        (4, "ln", "gives 0 layers at width 4"),
        (256, "log", "depth law 'log': valid are printed, ln, qwen3"),
    ],
)
def test_depths_that_cannot_be(width: int, law: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        depth_for(width, law)


def test_the_ladder() -> None:
    models = ladder()
    assert [model["hidden_size"] for model in models] == list(LADDER_WIDTHS)
    for model in models:
        width, heads, kv_heads = (model[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        assert heads == max(1, width // 128)
        assert heads % kv_heads == 0
        assert kv_heads == max(d for d in range(1, max(1, heads // 2) + 1) if heads % d == 0)
        assert model["intermediate_size"] == 3 * width
        assert model["vocab_size"] == 151_936
        assert model["head_dim"] == 128
        assert model["tie_word_embeddings"]
        assert model["num_hidden_layers"] == depth_for(width)
    assert [n_params(model) for model in models] == sorted(n_params(model) for model in models)


def test_shipped_configs() -> None:
    """Published sizes in billions; names smallest first."""
    names = shipped_names()
    assert names == ["gpt2", "qwen3-0.6b", "llama-3.2-1b", "qwen3-moe", "qwen3-1.7b", "qwen3-4b", "qwen3-8b",
                     "qwen3-14b", "qwen3-32b"]  # fmt: skip
    billions = [n_params(load_config(name)) / 1e9 for name in names]
    assert billions == pytest.approx([0.1244, 0.596, 1.236, 1.465, 1.72, 4.02, 8.19, 14.77, 32.76], rel=0.002)
    for name in names:
        check_config(load_config(name))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 0}, r"width \(hidden_size\) is 0: valid is an integer of at least 1"),
        ({"width": -64}, "width"),
        ({"depth": 0}, "depth"),
        ({"depth": -1}, "depth"),
        ({"heads": 0}, "heads"),
        ({"heads": -2}, "heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 65}, "head_dim 65 is odd"),
        ({"ffn": 0}, "ffn"),
        ({"vocab": -5}, "vocab"),
        ({"width": 64.0}, "width"),
        ({"width": True}, "width"),
        ({"heads": 12, "kv_heads": 5}, "heads 12 is not divisible by kv_heads 5: valid kv_heads are 1, 2, 3, 4, 6, 12"),
        ({"heads": 2, "kv_heads": 4}, "not divisible"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_config(**{"width": 256, "depth": 4, **sizes})


@given(width=st.integers(1, 8192), depth=st.integers(1, 100))
def test_any_positive_width_and_depth_make_a_model(width: int, depth: int) -> None:
    config = make_config(width=width, depth=depth)
    heads = {"heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"]}
    wider, deeper = (make_config(width=width + 1, depth=depth, **heads), make_config(width=width, depth=depth + 1))
    assert n_params(config) < min(n_params(wider), n_params(deeper))
    untied = make_config(width=width, depth=depth, tied=False)
    assert n_params(untied) - n_params(config) == 151_936 * width


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "no field 'model_type'"),
        ('{"hidden_size": 64}', "no field 'model_type'"),
        ("\xff\xfe", "UTF-16"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message) as fault:
        load_config(str(path))
    assert str(path) in str(fault.value)


def test_configs_by_path_and_by_name(tmp_path: Path) -> None:
    config = make_config(width=128, depth=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(str(tmp_path / "config.json")) == config
    assert load_config("qwen3-0.6b")["hidden_size"] == 1024
    with pytest.raises(UsageError, match=r"unknown config 'qwen3-9b'.*qwen3-8b.*config\.json"):
        load_config("qwen3-9b")
    with pytest.raises(UsageError, match="unknown config"):
        load_config(str(tmp_path))
    with pytest.raises(UsageError, match="unknown config"):
        load_config("../data/prices")


def test_another_depth() -> None:
    config = {**make_config(width=128, depth=4), "layer_types": ["full", "sliding", "full", "sliding"]}
    assert with_depth(config, 3)["layer_types"] == ["full", "sliding", "full"]
    assert with_depth(config, 6)["layer_types"] == ["full", "sliding"] * 3
    assert config["num_hidden_layers"] == 4
    by_layer = {**config, "no_rope_layers": [1, 1, 1, 0], "mlp_only_layers": [3]}
    assert with_depth(by_layer, 6)["no_rope_layers"] == [1, 1, 1, 0, 1, 1]
    assert with_depth(by_layer, 6)["mlp_only_layers"] == [3]  # says which, not what each is
    with pytest.raises(UsageError, match="depth"):
        with_depth(config, 0)


def test_the_printed_law_is_what_its_formula_says() -> None:
    assert all(depth_for(w) == round(0.77 * math.log2(w) - 2.5) for w in LADDER_WIDTHS)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (load_config("qwen3-0.6b"), 40960),
        (load_config("gpt2"), 1024),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_the_context_is_what_the_config_says(config: dict[str, Any], context: int | None) -> None:
    assert context_of(config) == context
    assert pretraining_seq(config) == min(context or 4096, 4096)


def test_layers_with_windows() -> None:
    """As transformers has it: a Qwen's only where it says so, from `max_window_layers` on; Gemma's by a pattern."""
    mistral = {"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 64}
    qwen = {"model_type": "qwen3", "num_hidden_layers": 4, "sliding_window": 64, "max_window_layers": 2}
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 64}
    used = {**qwen, "use_sliding_window": True}
    assert [has_windows(mistral, seq) for seq in (63, 64, 65)] == [False, True, True]
    assert not has_windows({**mistral, "sliding_window": None}, 65)
    assert has_windows({"model_type": "mistral"}, 4096)
    assert not has_windows(qwen, 65)
    assert has_windows(used, 65)
    assert not has_windows({**gemma, "layer_types": ["full_attention"] * 4}, 65)
