"""Keeps the weights of a model's linear layers in fewer bits than 16, for calls of inference, as torch's own operators
multiply them. Embeddings and the output layer stay as they are.

- "fp8": weights and activations in e4m3, each with one scale; that of the activations is found at every call.
- "int8": weights with a scale per row, which every call casts to bf16 before the product: what torchao's weight-only
  int8 runs without a compiler. torch has a kernel for it (`_weight_int8pack_mm`), on CUDA of one thread per result that
  multiplies in fp32 (2.11).
- "int4": weights in groups of GROUP with a scale and a zero each, unpacked within the product (`_weight_int4pack_mm`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from flopcast.errors import UsageError

GROUP = 64  # weights that share a scale and a zero; torch's kernel takes 32, 64, 128 and 256
INNER_TILES = 8  # of 16 weights along a row that are packed together; torch's kernel takes 2, 4 and 8
# Multiples that a layer's results and inputs have to be for torch's operator.
MULTIPLES = {"fp8": (16, 16), "int8": (1, 1), "int4": (8, 16 * INNER_TILES)}
LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12  # of activations that are all zeros


class Quantised(torch.nn.Module):
    """A linear layer on packed weights: `weight` is a parameter that nothing trains, scales are buffers. `weight`
    knows as `stands_for` how many parameters it packs."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        weight = self.packed(layer.weight.detach())
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight.stands_for = layer.weight.numel()  # type: ignore[attr-defined]
        self.bias = layer.bias

    def packed(self, weight: Tensor) -> Tensor:
        """Returns weights [results, inputs] as they are kept, and registers their scales."""
        raise NotImplementedError

    def product(self, rows: Tensor) -> Tensor:
        """Returns rows [rows, inputs] times the weights: [rows, results]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class Fp8(Quantised):
    scale: Tensor

    def packed(self, weight: Tensor) -> Tensor:
        self.register_buffer("scale", scale_of(weight))
        return (weight / self.scale).to(torch.float8_e4m3fn)

    def product(self, rows: Tensor) -> Tensor:
        scale = scale_of(rows)
        return torch._scaled_mm(
            (rows / scale).to(torch.float8_e4m3fn), self.weight.t(), scale_a=scale, scale_b=self.scale,
            out_dtype=rows.dtype,
        )  # fmt: skip


class Int8(Quantised):
    scale: Tensor

    def packed(self, weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1).clamp(min=SMALLEST_SCALE) / 127
        self.register_buffer("scale", scale)
        return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)

    def product(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight.to(rows.dtype)) * self.scale


class Int4(Quantised):
    scale_and_zero: Tensor

    def packed(self, weight: Tensor) -> Tensor:
        groups = weight.reshape(weight.shape[0], -1, GROUP)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = ((high - low) / 15).clamp(min=SMALLEST_SCALE)
        numbers = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).reshape(weight.shape)
        # the kernel takes (number - 8) * scale + zero
        both = torch.cat([scale, low + 8 * scale], 2).transpose(0, 1).contiguous()
        self.register_buffer("scale_and_zero", both.to(torch.bfloat16))
        return torch._convert_weight_to_int4pack(numbers[:, ::2] << 4 | numbers[:, 1::2], INNER_TILES)

    def product(self, rows: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(rows, self.weight, GROUP, self.scale_and_zero)


_LAYERS: dict[str, type[Quantised]] = {"fp8": Fp8, "int8": Int8, "int4": Int4}


def scale_of(values: Tensor) -> Tensor:
    """The one scale, in fp32, that brings the largest of `values` to e4m3's largest number."""
    return values.abs().amax().float().clamp(min=SMALLEST_SCALE) / LARGEST_E4M3


def quantise(model: torch.nn.Module, weights: str) -> None:
    """Replaces the linear layers within a causal language model, but the output layer, by those of one of QUANTISED.
    Raises UsageError as `replace_layers`, and for sizes that torch's operators do not take."""

    def packed(path: str, layer: torch.nn.Linear) -> torch.nn.Module:
        check_sizes(weights, path, layer.out_features, layer.in_features)
        return _LAYERS[weights](layer)

    replace_layers(model, packed, f"weights in {weights}", "weights in bf16")


def replace_layers(
    model: torch.nn.Module, made: Callable[[str, torch.nn.Linear], torch.nn.Module], told: str, instead: str
) -> None:
    """Replaces the linear layers within a causal language model, but the output layer, by what `made` makes of each and
    its name.

    Raises UsageError for a model that has none, and one whose experts' weights are kept in banks: `told` names what was
    asked for, `instead` what to use in its place.
    """
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    output = find()
    found = [
        (parent, f"{path}.{name}".removeprefix("."), name, layer)
        for path, parent in model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is torch.nn.Linear and layer is not output
    ]
    kind = type(model).__name__
    if not found:
        raise UsageError(
            f"{told}: {kind} has no linear layers besides its output layer (GPT-2's are of a kind of transformers' "
            f"own); use {instead}"
        )
    if (bank := next((name for name, p in model.named_parameters() if p.ndim == 3), None)) is not None:
        raise UsageError(
            f"{told}: {kind} keeps the weights of its experts together ({bank}), which is not done in fewer bits; use "
            f"{instead}"
        )
    for parent, path, name, layer in found:
        setattr(parent, name, made(path, layer))


def check_sizes(weights: str, path: str, results: int, inputs: int) -> None:
    """Raises UsageError for a layer of sizes that torch's operator on these weights does not take."""
    for what, size, multiple in zip(("results", "inputs"), (results, inputs), MULTIPLES[weights], strict=True):
        if size % multiple:
            raise UsageError(
                f"weights in {weights}: {path} has {size} {what}, and torch's product takes multiples of {multiple}; "
                "use another width, or weights in bf16 or int8"
            )
