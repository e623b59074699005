"""Says whether the layers of a model are one layer repeated, as transformers builds them at the model's own depth.

A config need not say so: DeepSeek-V3's first three layers have no experts, the fourth of Qwen3-Next attends otherwise,
and SmolLM3 rotates no fourth one, by rules of their own classes. The few layers that are traced show nothing of it.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from flopcast.files import cache_folder, read_own
from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.library.stored import relevant, versions
from flopcast.roofline.stream.model.models import Config, depth_of

if TYPE_CHECKING:
    import torch

# Families whose classes build one kind of layer whatever the config says: nothing is built to answer for them.
_UNIFORM = ("gpt2", "llama", "mistral", "qwen3")
# Families whose layers differ by their window alone, of which `models.has_layers_of_two_kinds` knows where it matters.
_BY_WINDOW = ("gemma2", "gemma3_text", "gpt_oss", "olmo3", "qwen2")
# What is written into a layer that says which one it is, or how its numbers are made, but not what it launches.
_OF_NO_MATTER = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "scaling", "scale", "norm_factor")


def are_alike(config: Config) -> bool:
    """Whether all layers of `config` are of one kind. True as well for what transformers cannot build or what has no
    stack of layers, of which the trace speaks. The answer is kept in the user's cache: building takes seconds."""
    kind = config["model_type"]
    if kind in _UNIFORM or (kind == "qwen3_moe" and not _has_dense_layers(config)):
        return True
    return _answered(canonical_json(config))


def _has_dense_layers(config: Config) -> bool:
    return bool(config.get("mlp_only_layers")) or (config.get("decoder_sparse_step") or 1) != 1


@cache
def _answered(config: str) -> bool:
    key = hashlib.sha256(canonical_json(relevant(json.loads(config))).encode()).hexdigest()[:20]
    path = cache_folder("layers") / versions("transformers") / f"{key}.json"
    with suppress(OSError, ValueError):
        return bool(json.loads(read_own(path)))
    found = _built(json.loads(config))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    return found


def _built(config: Config) -> bool:
    with no_garbage_collection():
        import torch

        from flopcast.microbench.recipe.training_step import build_model

        try:
            with torch.device("meta"):
                model = build_model(config)
        except Exception:  # as the trace will say
            return True
    depth = depth_of(config)
    stacks = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == depth]
    by_window = config["model_type"] in _BY_WINDOW
    return all(len({_kind_of(layer, by_window=by_window) for layer in stack}) == 1 for stack in stacks)


def _kind_of(layer: torch.nn.Module, *, by_window: bool) -> tuple[Any, ...]:
    """What a layer launches, as far as its modules say: their classes, the shapes of their parameters, and their
    fields of one value."""
    modules = []
    for name, module in layer.named_modules():
        fields = {
            field: value
            for field, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and _matters(field, by_window)
        }
        shapes = [(own, tuple(weight.shape)) for own, weight in module.named_parameters(recurse=False)]
        modules.append((name, type(module), tuple(sorted(fields.items(), key=str)), tuple(shapes)))
    return tuple(modules)


def _matters(field: str, by_window: bool) -> bool:
    of_window = "sliding" in field or field in ("window_size", "attention_type", "layer_type")
    return field.strip("_") not in _OF_NO_MATTER and not (by_window and of_window)
