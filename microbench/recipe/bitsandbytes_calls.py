"""Stands in for bitsandbytes where a step is traced: the calls that its 4-bit layers and its 8-bit AdamW make, without
its kernels, so that a forecast needs no library of CUDA code.

As of bitsandbytes 0.42 to 0.50, read and not copied: weights of QLoRA are of 4 bits ("nf4") in blocks of BLOCK, whose
largest values are again of 8 bits in blocks of STATE_BLOCK ("double quantisation"); both passes unpack them to bf16 for
torch's own product. (From 0.50 on a forward of few rows, at most 1,536, may run one kernel that does both.) AdamW keeps
its two states in 8 bits in blocks of STATE_BLOCK, in fp32 of small parameters, and waits for the device at each one.

The operators are of a namespace of their own, "bnb": a process may load the library as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from flopcast.microbench.recipe import finetune, optimizers
from flopcast.microbench.recipe.quantised import replace_layers

BLOCK, STATE_BLOCK = 64, 256
LEAST_NUMEL = 4096  # of parameters whose states are of 8 bits
CODE = "code_of_8_bits"  # the name of the one buffer that all layers share
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01

_UPDATE = (
    "(str name, Tensor g, Tensor(a!) p, Tensor(b!) state1, Tensor(c!) state2, float beta1, float beta2, float eps, "
    "int step, float lr, float weight_decay"
)
torch.library.define(
    "bnb::dequantize_blockwise", "(Tensor A, Tensor absmax, Tensor code, int block, ScalarType dtype) -> Tensor"
)
torch.library.define(
    "bnb::dequantize_4bit", "(Tensor A, Tensor absmax, int block, str kind, int[] shape, ScalarType dtype) -> Tensor"
)
torch.library.define("bnb::optimizer_update_32bit", f"{_UPDATE}) -> ()")
torch.library.define(
    "bnb::optimizer_update_8bit_blockwise",
    f"{_UPDATE}, Tensor qmap1, Tensor qmap2, Tensor(d!) absmax1, Tensor(e!) absmax2) -> ()",
)


def _blockwise(A: Tensor, absmax: Tensor, code: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(A, dtype=dtype)


def _4bit(A: Tensor, absmax: Tensor, block: int, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return A.new_empty(shape, dtype=dtype)


def _nothing(*_: Any) -> None: ...


torch.library.register_fake("bnb::dequantize_blockwise", _blockwise)
torch.library.register_fake("bnb::dequantize_4bit", _4bit)
torch.library.register_fake("bnb::optimizer_update_32bit", _nothing)
torch.library.register_fake("bnb::optimizer_update_8bit_blockwise", _nothing)


class FourBitLinear(torch.nn.Linear):
    """A linear layer on a frozen base of 4 bits. It computes in bf16 and gives what it got."""

    absmax: Tensor
    outer_absmax: Tensor
    offset: Tensor

    def __init__(self, layer: torch.nn.Linear, code: Tensor) -> None:
        """`code`: the 256 values that 8 bits stand for, one tensor for all layers."""
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        numel = layer.weight.numel()
        blocks = ceil(numel / BLOCK)
        make = layer.weight.new_empty
        self.weight = torch.nn.Parameter(make(((numel + 1) // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.weight.stands_for = numel  # type: ignore[attr-defined]
        self.bias = layer.bias
        self.register_buffer("absmax", make(blocks, dtype=torch.uint8))
        self.register_buffer("outer_absmax", make(ceil(blocks / STATE_BLOCK), dtype=torch.float32))
        self.register_buffer("offset", make((), dtype=torch.float32))
        self.codes = (code,)  # not of its own

    def unpacked(self) -> Tensor:
        """The weights [results, inputs] in bf16."""
        calls = torch.ops.bnb
        absmax = calls.dequantize_blockwise(self.absmax, self.outer_absmax, *self.codes, STATE_BLOCK, torch.float32)
        absmax += self.offset
        shape = [self.out_features, self.in_features]
        found: Tensor = calls.dequantize_4bit(self.weight, absmax, BLOCK, "nf4", shape, torch.bfloat16)
        return found

    def forward(self, input: Tensor) -> Tensor:
        x, bias = input.to(torch.bfloat16), self.bias
        out: Tensor = _Product.apply(x, self, None if bias is None else bias.to(torch.bfloat16))  # type: ignore[no-untyped-call]
        return out.to(input.dtype).clone()  # peft copies it, before it adds to it


class _Product(torch.autograd.Function):
    """Unpacks the weights in the forward, and again in the backward, which has a gradient of the rows alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.unpacked(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return (gradient @ ctx.layer.unpacked() if ctx.needs_input_grad[0] else None), None, None


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose states are of 8 bits, one parameter after the other."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.maps: tuple[Tensor, Tensor] | None = None  # the values that 8 bits stand for, with a sign and without

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])
                    torch.cuda.synchronize()

    def _update(self, parameter: Tensor, lr: float) -> None:
        state, zeros = self.state[parameter], partial(parameter.new_zeros, dtype=torch.float32)
        is_small = parameter.numel() < LEAST_NUMEL
        if not state:
            dtype = torch.float32 if is_small else torch.uint8
            state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")}
            if not is_small:
                blocks = ceil(parameter.numel() / STATE_BLOCK)
                state |= {name: zeros(blocks) for name in ("absmax1", "absmax2")}
        common = (
            "adam", parameter.grad, parameter, state["state1"], state["state2"], *BETAS, EPSILON, 1, lr, WEIGHT_DECAY,
        )  # fmt: skip
        if is_small:
            torch.ops.bnb.optimizer_update_32bit(*common)
        else:
            self.maps = self.maps or (zeros(256), zeros(256))
            torch.ops.bnb.optimizer_update_8bit_blockwise(*common, *self.maps, state["absmax1"], state["absmax2"])


def four_bit_base(model: torch.nn.Module) -> None:
    """Replaces the linear layers of a model, but its output layer, by such of 4 bits; the rest is frozen. Raises
    UsageError as `replace_layers`."""
    code = next(model.parameters()).new_empty(256, dtype=torch.float32)
    model.register_buffer(CODE, code)
    replace_layers(model, lambda _path, layer: FourBitLinear(layer, code), "finetune qlora", "finetune lora")
    model.requires_grad_(False)


def kept_beside_weights(model: torch.nn.Module) -> list[str]:
    """The names of a model's buffers in which layers of 4 bits keep their scales here. The library keeps them beside
    the weight, where neither a module nor DistributedDataParallel, which sends buffers around, knows of them."""
    layers = {path for path, module in model.named_modules() if isinstance(module, FourBitLinear)}
    return [
        name
        for name, _ in model.named_buffers()
        if name.rpartition(".")[0] in layers or name.rpartition(".")[2] == CODE
    ]


@contextmanager
def standing_in() -> Iterator[None]:
    """Within the context models and optimizers are built with these in place of the library's."""
    base, optimizer = finetune.four_bit_base, optimizers.adamw_of_8_bits
    finetune.four_bit_base, optimizers.adamw_of_8_bits = four_bit_base, AdamW8bit
    try:
        yield
    finally:
        finetune.four_bit_base, optimizers.adamw_of_8_bits = base, optimizer
