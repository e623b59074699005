"""Tells which layers of a model are of one kind, by the modules that transformers builds on torch's meta device."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from flopcast.microbench.recipe.training_step import build_model, find_layers
from flopcast.roofline.stream.model.models import Config, depth_of

# What is written into a layer that says which one it is, or how its numbers are made, but not what it launches.
_OF_NO_MATTER = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "scaling", "scale", "norm_factor")


def kinds_of_layers(config: Config, *, has_windows: bool) -> list[Hashable]:
    """Returns what each layer launches, as far as its modules say, equal for layers that launch the same. Empty where
    there is no one stack of layers, or no model. `has_windows`: whether windows are shorter than the sequences; what
    says which layer has one is left out otherwise."""
    try:
        with torch.device("meta"):
            model = build_model(config)
    except Exception:  # as the trace will say
        return []
    layers = find_layers(model)
    if layers is None or len(layers) != depth_of(config):
        return []
    return [_kind_of(layer, has_windows=has_windows) for layer in layers]


def _kind_of(layer: torch.nn.Module, *, has_windows: bool) -> Hashable:
    """The classes of a layer's modules, the shapes of their parameters, and their fields of one value."""
    modules = []
    for name, module in layer.named_modules():
        fields = {
            field: value
            for field, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and _matters(field, has_windows)
        }
        shapes = [(own, tuple(weight.shape)) for own, weight in module.named_parameters(recurse=False)]
        modules.append((name, type(module), tuple(sorted(fields.items(), key=str)), tuple(shapes)))
    return tuple(modules)


def _matters(field: str, has_windows: bool) -> bool:
    of_window = "sliding" in field or field in ("window_size", "attention_type", "layer_type")
    return field.strip("_") not in _OF_NO_MATTER and (has_windows or not of_window)
