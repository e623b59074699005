"""Image models by name, with random weights and a cross-entropy over 1000 classes: `--module resnet50`.

A name is MODEL[@SIZE][@nhwc]: `mobilenet_v2`, `vit_b16@384`, `resnet50@nhwc`. SIZE is the side of its images in
pixels, by default the one that the model was published for; "nhwc" keeps weights and images channels-last, the layout
that cuDNN's 16-bit kernels are made for. MODEL is one of `MODELS`, built by transformers; `torchvision/NAME` and
`timm/NAME` are any classifier of these libraries, where they are installed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flopcast.errors import UsageError

CLASSES = 1000
MOST_PIXELS = 16384  # of a side
_NAME = re.compile(r"(?:(torchvision|timm)/)?([A-Za-z]\w*)(?:@(\d+))?(?:@(nhwc))?")
_SIZE = 224  # pixels of a side, where a model says no other

_BOTTLENECK, _BASIC = ("bottleneck", (256, 512, 1024, 2048)), ("basic", (64, 128, 256, 512))


def _resnet(kind: tuple[str, tuple[int, ...]], *depths: int) -> tuple[str, int, dict[str, Any]]:
    return "resnet", _SIZE, {"layer_type": kind[0], "hidden_sizes": list(kind[1]), "depths": list(depths)}


def _vit(width: int, layers: int, patch: int, size: int = _SIZE) -> tuple[str, int, dict[str, Any]]:
    fields = {"num_hidden_layers": layers, "num_attention_heads": width // 64, "patch_size": patch}
    return "vit", size, {"hidden_size": width, "intermediate_size": 4 * width, **fields}


def _convnext(middle: int, *widths: int) -> tuple[str, int, dict[str, Any]]:
    return "convnext", _SIZE, {"depths": [3, 3, middle, 3], "hidden_sizes": list(widths)}


def _efficientnet(width: float, depth: float, size: int, features: int) -> tuple[str, int, dict[str, Any]]:
    fields = {"width_coefficient": width, "depth_coefficient": depth, "hidden_dim": features}
    return "efficientnet", size, {**fields, "image_size": size}


# Name -> transformers' model_type, the side of its images, and the fields of its config that are not the default's.
MODELS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "resnet18": _resnet(_BASIC, 2, 2, 2, 2), "resnet34": _resnet(_BASIC, 3, 4, 6, 3),
    "resnet50": _resnet(_BOTTLENECK, 3, 4, 6, 3), "resnet101": _resnet(_BOTTLENECK, 3, 4, 23, 3),
    "resnet152": _resnet(_BOTTLENECK, 3, 8, 36, 3),
    "mobilenet_v2": ("mobilenet_v2", _SIZE, {}),
    "efficientnet_b0": _efficientnet(1.0, 1.0, 224, 1280), "efficientnet_b1": _efficientnet(1.0, 1.1, 240, 1280),
    "efficientnet_b2": _efficientnet(1.1, 1.2, 260, 1408), "efficientnet_b3": _efficientnet(1.2, 1.4, 300, 1536),
    "efficientnet_b4": _efficientnet(1.4, 1.8, 380, 1792),
    "vit_s16": _vit(384, 12, 16), "vit_b16": _vit(768, 12, 16), "vit_b32": _vit(768, 12, 32),
    "vit_l16": _vit(1024, 24, 16),
    "convnext_tiny": _convnext(9, 96, 192, 384, 768), "convnext_small": _convnext(27, 96, 192, 384, 768),
    "convnext_base": _convnext(27, 128, 256, 512, 1024), "convnext_large": _convnext(27, 192, 384, 768, 1536),
}  # fmt: skip


@dataclass(frozen=True)
class ImageModel:
    """An image model by name: its library ("" for transformers), its model there, the side of its images in pixels."""

    name: str
    library: str
    model: str
    size: int
    is_channels_last: bool

    def build(self, batch: int) -> tuple[torch.nn.Module, Any] | tuple[torch.nn.Module, Any, Callable[[Any], Any]]:
        """Returns (module, batch), or with a loss function, as a user's own factory does."""
        images, labels = torch.randn(batch, 3, self.size, self.size), torch.randint(0, CLASSES, (batch,))
        module = self._module().train()
        if self.is_channels_last:
            images = images.to(memory_format=torch.channels_last)
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.library:
            return module, {"pixel_values": images, "labels": labels}
        return module, images, lambda logits: torch.nn.functional.cross_entropy(logits, labels)

    def _module(self) -> torch.nn.Module:
        if self.library:
            return _of_library(self.library, self.model)
        from transformers import AutoConfig, AutoModelForImageClassification

        kind, _, fields = MODELS[self.model]
        sized = {"image_size": self.size} if kind in ("vit", "mobilenet_v2", "convnext", "efficientnet") else {}
        config = AutoConfig.for_model(kind, **{**fields, **sized, "num_labels": CLASSES})
        attention = {"attn_implementation": "sdpa"} if kind == "vit" else {}
        module: torch.nn.Module = AutoModelForImageClassification.from_config(config, **attention)
        return module


def _of_library(library: str, model: str) -> torch.nn.Module:
    try:
        found: Any = importlib.import_module("torchvision.models" if library == "torchvision" else library)
    except ImportError as fault:
        raise UsageError(
            f"module {library}/{model} needs {library} ({fault}): `pip install {library}`; without it valid are "
            f"{', '.join(MODELS)}"
        ) from fault
    try:
        module: torch.nn.Module = (
            found.get_model(model, weights=None) if library == "torchvision" else found.create_model(model)
        )
    except (ValueError, RuntimeError) as fault:  # no model of this name
        text = " ".join(str(fault).split())[:200]
        raise UsageError(
            f"module {library}/{model}: {library} says: {text}; valid are the names that its documentation lists"
        ) from fault
    return module


def named(name: str) -> Callable[..., Any] | None:
    """Returns the factory of an image model, which takes `batch`; None where the name is none of these models'.

    Raises UsageError for a size that no image has, and for a model that is not known."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    library, model, size, layout = found.groups()
    if not library and model not in MODELS:
        return None
    side = int(size) if size else MODELS[model][1] if not library else _SIZE
    if not 32 <= side <= MOST_PIXELS:
        raise UsageError(f"module {name!r}: images of {side} pixels a side; valid are 32 to {MOST_PIXELS}")
    asked = ImageModel(name, library or "", model, side, bool(layout))

    def factory(batch: int = 64) -> Any:
        return asked.build(batch)

    return factory
