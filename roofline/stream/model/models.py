"""Models: shipped configs, config.json files, and the ladder of widths. Imports neither torch nor transformers.

A model is a mapping with the fields of a transformers config.json. The ladder's shape: head_dim 128, heads = max(1,
width // 128), kv_heads = the largest divisor of heads not above max(1, heads / 2), ffn = 3 x width, vocabulary 151,936,
tied embeddings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import MOST_LAYERS
from flopcast.roofline.base.csv_files import read_text

Config = Mapping[str, Any]  # a config.json, whose fields differ by architecture

VOCABULARY = 151_936
HEAD_DIM = 128
DEPTH_LAWS = ("printed", "ln", "qwen3")
LADDER_WIDTHS = tuple(range(256, 4097, 256))
# Widths of the CPU's ladder: a CPU reaches 1e10 to 1e11 FLOP/s, so its models are a hundred times smaller.
CPU_VOCABULARY, CPU_BATCH, CPU_SEQ = 4096, 1, 128


def shipped_names() -> list[str]:
    """Lists the names that `--config` takes besides files, smallest model first."""
    folder = files("flopcast.roofline") / "data" / "configs"
    names = [entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")]
    return sorted(names, key=lambda name: n_params(load_config(name)))


def load_config(name_or_path: str) -> dict[str, Any]:
    """Loads a shipped config by name, or a transformers config.json.

    Raises UsageError when it is neither, or describes a model that cannot be read.
    """
    shipped = files("flopcast.roofline") / "data" / "configs" / f"{name_or_path}.json"
    path = Path(name_or_path)
    if "/" not in name_or_path and shipped.is_file():
        text, source = shipped.read_text(encoding="utf-8"), name_or_path
    elif path.is_file():
        text, source = read_text(path, "give a transformers config.json"), str(path)
    else:
        raise UsageError(
            f"unknown config {name_or_path!r}: shipped are {', '.join(shipped_names())}; "
            "or give the path of a transformers config.json"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"config {source}: not JSON ({fault}); give a transformers config.json") from fault
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"config {source}: no field 'model_type'; give a transformers config.json")
    if not isinstance(config["model_type"], str):
        raise UsageError(f"config {source}: model_type is {config['model_type']!r}: valid is a name such as 'qwen3'")
    return config


def make_config(
    *,
    width: int,
    depth: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    ffn: int | None = None,
    vocab: int = VOCABULARY,
    tied: bool = True,
) -> dict[str, Any]:
    """Makes a Qwen3 config; sizes that are not given follow the ladder's shape. Checked by `check_config`."""
    heads = max(1, width // HEAD_DIM) if heads is None else heads
    # before searching for the divisors of a huge number of heads
    check_config({"hidden_size": width, "num_attention_heads": heads})
    if kv_heads is None:
        kv_heads = _ladder_kv_heads(heads) if heads > 0 else heads
    config = {
        "model_type": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 3 * width if ffn is None else ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    check_config(config)
    return config


def _ladder_kv_heads(heads: int) -> int:
    most = max(1, heads // 2)
    return next(count for count in range(most, 0, -1) if heads % count == 0)


_SIZES = {
    "hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "intermediate_size": "ffn",
    "vocab_size": "vocab", "n_embd": "width", "n_layer": "depth", "n_head": "heads",
}  # fmt: skip


MOST_SIZE = 10_000_000  # of one dimension; the largest published are vocabularies of 262,144


def check_config(config: Config) -> None:
    """Raises UsageError for sizes that are not positive integers up to MOST_SIZE, for more than MOST_LAYERS layers, and
    for heads that kv_heads do not divide."""
    for field, option in _SIZES.items():
        value = config.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"{option} ({field}) is {value!r}: valid is an integer of at least 1")
        if value is not None and value > MOST_SIZE and field not in ("num_hidden_layers", "n_layer"):
            raise UsageError(f"{option} ({field}) is {value}: valid is an integer of at least 1, at most {MOST_SIZE}")
    if depth_of(config) > MOST_LAYERS:
        raise UsageError(
            f"depth ({depth_field(config)}) is {depth_of(config)}: valid is an integer of at least 1, at most "
            f"{MOST_LAYERS}"
        )
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        raise UsageError(
            f"heads {heads} is not divisible by kv_heads {kv_heads}: valid kv_heads are {', '.join(map(str, divisors))}"
        )
    head_dim = config.get("head_dim")
    if head_dim and head_dim % 2:
        raise UsageError(f"head_dim {head_dim} is odd: rotary embedding needs an even number")


def depth_for(width: int, law: str = "printed") -> int:
    """Returns the ladder's number of layers at `width`.

    printed: round(0.77 log2 width - 2.5), as the source article prints it. ln: ln depth = 0.77 ln width -
    2.5. qwen3: the layers of the published Qwen3 of nearest width. Raises UsageError for a result below one layer.
    """
    if width < 1:
        raise UsageError(f"width is {width}: valid is an integer of at least 1")
    if width > MOST_SIZE:
        raise UsageError(f"width is {width}: valid is an integer of at least 1, at most {MOST_SIZE}")
    if law == "printed":
        depth = round(0.77 * math.log2(width) - 2.5)
    elif law == "ln":
        depth = round(math.exp(0.77 * math.log(width) - 2.5))
    elif law == "qwen3":
        published = [c for name in shipped_names() if (c := load_config(name))["model_type"] == "qwen3"]
        nearest = min(published, key=lambda c: abs(math.log(c["hidden_size"] / width)))
        return int(nearest["num_hidden_layers"])
    else:
        raise UsageError(f"depth law {law!r}: valid are {', '.join(DEPTH_LAWS)}")
    if depth < 1:
        raise UsageError(
            f"depth law {law!r} gives {depth} layers at width {width}: valid are widths that give at least "
            "one; choose a larger width, or give --depth"
        )
    return depth


def ladder(widths: tuple[int, ...] = LADDER_WIDTHS, law: str = "printed") -> list[Config]:
    """Returns the models of the ladder, one per width."""
    return [make_config(width=width, depth=depth_for(width, law)) for width in widths]


def depth_field(config: Config) -> str:
    """Returns the name of the field that holds the number of layers of a config.json."""
    return "n_layer" if "n_layer" in config and "num_hidden_layers" not in config else "num_hidden_layers"


def depth_of(config: Config) -> int:
    """Returns the number of layers of a config.json; 0 where it does not state one."""
    return int(config.get(depth_field(config)) or 0)


def context_of(config: Config) -> int | None:
    """Returns the longest sequence that a config.json says its model is made for; None where it does not say."""
    own = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    found = own.get("max_position_embeddings", own.get("n_positions")) if own else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def with_depth(config: Config, depth: int) -> dict[str, Any]:
    """Returns the same model with `depth` layers; per-layer lists are cut or repeated to fit."""
    before = config.get(depth_field(config))
    changed = {**config, depth_field(config): depth}
    for field, of_layers in config.items():  # such as `layer_types`, `mlp_layer_types` and `no_rope_layers`
        if "layer" not in field or not isinstance(of_layers, list) or not of_layers:
            continue
        if field == "layer_types" or len(of_layers) == before:
            changed[field] = [of_layers[i % len(of_layers)] for i in range(depth)]
    check_config(changed)
    return changed


def n_params(config: Config) -> int:
    """Counts the parameters of a Qwen3, Qwen3-MoE, Llama, Mistral or GPT-2 config, tied weights once. For other models
    use the count of a traced stream. Raises KeyError where the config lacks a size."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        ffn = config.get("n_inner") or 4 * width
        layer = 4 * width * width + 4 * width + 2 * width * ffn + ffn + width + 4 * width
        return int((config["vocab_size"] + config["n_positions"]) * width + config["n_layer"] * layer + 2 * width)
    width, depth, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    query, key = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    feed_forward = 3 * width * config["intermediate_size"]
    if config["model_type"] == "qwen3_moe":
        experts = config["num_experts"]
        feed_forward = 3 * width * config["moe_intermediate_size"] * experts + width * experts
    norms = 2 * head_dim if config["model_type"].startswith("qwen3") else 0
    layer = 2 * width * query + 2 * width * key + norms + feed_forward + 2 * width
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings") else 2)
    return int(embeddings + depth * layer + width)


MODEL_COLUMNS = {"width": int, "depth": int, "heads": int, "kv_heads": int, "head_dim": int, "ffn": int, "vocab": int,
                 "tied": bool, "config": str, "depth_law": str}  # fmt: skip


def model_from(
    *, config: str | None = None, depth: int | None = None, depth_law: str | None = None, **shape: int | bool | None
) -> dict[str, Any]:
    """Returns the config that options ask for: a file or a shipped name, or a `shape` as `make_config` takes it (None:
    not given), with the depth of the law where no depth is given. Raises UsageError."""
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if config:
        if depth_law:
            given["depth_law"] = depth_law
        if given:
            raise UsageError(
                f"config and {', '.join(given)} given: give either a config (with depth to change its layers) or the "
                "shape"
            )
        found = load_config(config)
        return found if depth is None else with_depth(found, depth)
    if "width" not in given:
        raise UsageError("no model: give config (a name or a config.json), or width")
    if depth is None:
        depth = depth_for(given["width"], depth_law or "printed")
    return make_config(depth=depth, **given)


# Families of transformers whose windows have this many keys where the config does not say.
def name_of(source: str | None, width: int | None, depth: int | None) -> str:
    """A short name for the model that options describe: that of its config, or of the folder of a config.json, else its
    width; and its depth where one was given."""
    path = Path(source or "")
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return (name or (f"w{width}" if width else "config")) + (f"-d{depth}" if depth else "")


_USUAL_WINDOW = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096, "cohere2": 4096, "olmo3": 4096, "gpt_oss": 128}


def has_windows(config: Config, seq: int) -> bool:
    """Whether some layer's queries do not see all earlier keys of a sequence, by a sliding window in its config. At as
    many tokens as the window has transformers makes a mask already."""
    window = config.get("sliding_window", _USUAL_WINDOW.get(config["model_type"]))
    if config.get("use_sliding_window", not config["model_type"].startswith("qwen")) is False or window is None:
        return False
    types = config.get("layer_types")
    return bool(seq >= window and (types is None or "sliding_attention" in types))
