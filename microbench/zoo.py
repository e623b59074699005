"""Builds modules that can be named on a command line: `--module flopcast.microbench.zoo:vit_b16`.

Each factory returns (module, batch), as a user's own factory would: the module as its library builds it, with weights
drawn at random and never downloaded, and a batch of the sizes that the model was published for. `train_mlp` returns a
step function instead. Sizes are keyword arguments with defaults, so that tests can ask for small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ModuleAndBatch = tuple[torch.nn.Module, Any]


def _images(batch: int, size: int, n_classes: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, n_classes, (batch,))}


def vit_b16(batch: int = 32, size: int = 224, layers: int = 12, width: int = 768) -> ModuleAndBatch:
    """ViT-B/16 (86 M parameters, 1000 classes), cross-entropy."""
    from transformers import ViTConfig, ViTForImageClassification

    options: dict[str, Any] = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": max(1, width // 64),
        "intermediate_size": 4 * width, "image_size": size, "patch_size": 16, "num_labels": 1000,
        "attn_implementation": "sdpa",
    }  # fmt: skip
    config = ViTConfig(**options)
    return ViTForImageClassification(config).train(), _images(batch, size, 1000)


def resnet50(batch: int = 32, size: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3)) -> ModuleAndBatch:
    """ResNet-50 (26 M parameters, 1000 classes), cross-entropy, images in torch's default layout."""
    from transformers import ResNetConfig, ResNetForImageClassification

    options: dict[str, Any] = {"depths": list(depths), "layer_type": "bottleneck", "num_labels": 1000}
    config = ResNetConfig(**options)
    return ResNetForImageClassification(config).train(), _images(batch, size, 1000)


def resnet50_channels_last(batch: int = 32, size: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3)) -> ModuleAndBatch:
    """ResNet-50 with weights and images in channels-last layout, the one that cuDNN's bf16 kernels are made for."""
    model, images = resnet50(batch, size, depths)
    images["pixel_values"] = images["pixel_values"].to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), images  # type: ignore[call-overload]


class _MLP(torch.nn.Module):
    """`depth` linear layers with GELU, and a cross-entropy over 1000 classes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return torch.nn.functional.cross_entropy(self.head(x), labels)


def mlp(batch: int = 4096, width: int = 4096, depth: int = 8) -> ModuleAndBatch:
    """Eight linear layers of 4096 x 4096 with GELU between, 138 M parameters, cross-entropy over 1000 classes."""
    return _MLP(width, depth).train(), (torch.randn(batch, width), torch.randint(0, 1000, (batch,)))


def transformer_encoder(
    batch: int = 16, seq: int = 256, width: int = 512, depth: int = 6
) -> tuple[torch.nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """torch's own nn.TransformerEncoder (dropout 0.1, 19 M parameters) with a loss function as third element."""
    layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).train()
    return model, torch.randn(batch, seq, width), lambda hidden: hidden.float().square().mean()


def train_mlp(batch: int = 4096, width: int = 4096, depth: int = 8) -> Callable[[], None]:
    """Returns a step function: forward, backward, gradient clipping and SGD with momentum, as a user would write it."""
    model, (x, labels) = mlp(batch, width, depth)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    x, labels = x.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
