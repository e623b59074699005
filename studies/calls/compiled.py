"""Measures what the launches of compiled graphs cost the host, by what is launched.

    python -m studies.calls.compiled OUT.json      measures, on a GPU, in a process of its own
    python -m studies.calls.compiled               what the committed processes say

Stacks of two depths of each kind of layer, compiled as a whole with their loss, under autocast in bf16; tiny Qwen3s,
which calibrate a host; and whole image models. They take turns, on an idle device. OUT.json gets by name and depth the
seconds of each phase and round, what its graphs launch there by kind, and the tensors that the graphs are given.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from flopcast.microbench import zoo
from flopcast.microbench.images import named
from flopcast.microbench.recipe.compiling import FIRST_STEPS, compile_model, counts_of, graphs_run
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build, build_module
from flopcast.roofline.stream.model.models import Config, load_config, make_config, with_depth
from studies.calls.convolutions import CHANNELS, IMAGES, LAYERS, SIZE, TOKENS
from studies.calls.turns import PHASES, Forward, in_turns
from studies.command import parser_of

Made = tuple[nn.Module, Forward]  # a model, and what runs its forward

DEPTHS = (4, 16)
DEPTHS_OF_MODELS = (2, 6)


class Scale(nn.Module):
    """A parameter more, and hardly a launch: inductor fuses all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Attend(nn.Module):
    """Attention of each image's rows to each other."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return found


OTHERS: dict[str, Callable[[], list[nn.Module]]] = {
    "scale": lambda: [Scale()],
    "linear-norm": lambda: [nn.Linear(SIZE, SIZE, bias=False), nn.LayerNorm(SIZE)],
    "linear-attend": lambda: [nn.Linear(SIZE, SIZE, bias=False), Attend()],
}
STACKS = LAYERS | TOKENS | OTHERS
OF_IMAGES = ("conv", "depthwise", "conv-norm-relu")  # in both layouts
OF_TOKENS = ("norm", "linear", "linear-gelu", *OTHERS)
INFERRED, NO_GRADIENTS = ("linear-gelu", "norm", "scale"), "no-grad"


class Stack(nn.Module):
    """Layers on top of each other, and the loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found.float().sum()


def with_own_code(model: nn.Module) -> nn.Module:
    """Gives the model a class whose forward is compiled by itself: all forms of one code object are asked in turn."""
    forward: Any = type(model).forward
    own = FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    own.__dict__.update(forward.__dict__)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model


def stacked(kind: str, layout: str, depth: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    model = Stack([layer for _ in range(depth) for layer in STACKS[kind]()]).to(device)
    model = model.to(memory_format=memory)  # type: ignore[call-overload]  # torch's stubs lack this keyword alone
    images = torch.randn(IMAGES, CHANNELS, SIZE, SIZE, device=device).to(memory_format=memory)
    return model, images.requires_grad_()


def compiled_stack(kind: str, layout: str, depth: int, device: torch.device) -> Made:
    model, images = stacked(kind, layout, depth, device)
    runs: Any = torch.compile(with_own_code(model))

    def forward() -> Tensor:
        model.zero_grad(set_to_none=True)
        images.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            found: Tensor = runs(images)
        return found

    return model, forward


CONFIGS = {
    "qwen3": (make_config(width=256, depth=2, vocab=1024), 4, 256),
    "gpt2": (load_config("gpt2") | {"vocab_size": 1024}, 1, 64),
}


def _vit(depth: int) -> zoo.ModuleAndBatch:
    return zoo.vit_b16(batch=2, size=64, layers=depth, width=128)


# Whole models, of one depth.
MODULES = ("resnet18@64", "resnet50@64@nhwc", "mobilenet_v2@64@nhwc", "convnext_tiny@64")


def compiled_step(step: Any) -> Made:
    model = with_own_code(step.model)
    compile_model(step, "compile")

    def forward() -> Tensor:
        step.zero_grad()
        loss: Tensor = step.forward()
        return loss

    return model, forward


def without_gradients(made: Made) -> Made:
    """The same, called as inference does; with a backward that has nothing to do."""
    model, forward = made
    nothing = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)

    def called() -> Tensor:
        with torch.no_grad():
            loss = forward()
        return loss + nothing

    return model, called


def of_config(config: Config, batch: int, seq: int, depth: int, device: torch.device) -> Made:
    return compiled_step(build(with_depth(config, depth), device, Recipe(batch=batch, seq=seq)))


def of_module(make: Callable[[], zoo.ModuleAndBatch], device: torch.device) -> Made:
    return compiled_step(build_module(*make(), device, Recipe()))


def _composed(make: Callable[[], Made]) -> Callable[[], Made]:
    return lambda: without_gradients(make())


def builders(device: torch.device) -> dict[str, dict[int, Callable[[], Made]]]:
    """Functions that make each model, by its name and depth."""
    stacks = [(kind, layout) for kind in OF_IMAGES for layout in ("nchw", "nhwc")]
    stacks += [(kind, "nchw") for kind in OF_TOKENS]
    found: dict[str, dict[int, Callable[[], Made]]] = {
        f"{kind}/{layout}": {depth: partial(compiled_stack, kind, layout, depth, device) for depth in DEPTHS}
        for kind, layout in stacks
    }
    for kind in INFERRED:
        found[f"{kind}/{NO_GRADIENTS}"] = {
            depth: _composed(partial(compiled_stack, kind, "nchw", depth, device)) for depth in DEPTHS
        }
    for name, (config, batch, seq) in CONFIGS.items():
        found[f"{name}/{NO_GRADIENTS}"] = {
            depth: _composed(partial(of_config, config, batch, seq, depth, device)) for depth in DEPTHS_OF_MODELS
        }
        found[name] = {depth: partial(of_config, config, batch, seq, depth, device) for depth in DEPTHS_OF_MODELS}
    found["vit"] = {depth: partial(of_module, partial(_vit, depth), device) for depth in DEPTHS_OF_MODELS}
    for name in MODULES:
        factory = named(name)
        assert factory is not None
        found[name] = {0: partial(of_module, partial(factory, batch=2), device)}
    return found


_CALL = re.compile(
    r"^ +(?:\w+ = )?(?:(\w+)\.run\(|extern_kernels\.(\w+)|torch\.ops\.aten\.(\w+)|aten\.(\w+))", re.MULTILINE
)


def launched(code: str) -> Counter[str]:
    """What a graph's generated code launches: "generated" kernels and calls of libraries by their names; "tensors" that
    it is given."""
    body = code[code.index("def call(") :]
    body = body[: body.find("\ndef ", 1)] if "\ndef " in body[1:] else body
    found = Counter("generated" if own[0] else next(filter(None, own[1:])) for own in _CALL.findall(body))
    given = re.search(r"^ +(.*) = args$", body, re.MULTILINE)
    found["tensors"] = given[1].count(",") + 1 if given else 0
    found["checks"] = body.count("assert_size_stride(")
    found["made"] = body.count("empty_strided_")
    return found


def by_phase(codes: Iterable[str]) -> dict[str, Counter[str]]:
    found = {phase: Counter[str]() for phase in PHASES}
    for code in codes:
        own = launched(code)
        found[counts_of(code)[0]] += own
    return found


def measured(device: torch.device, only: str = "") -> dict[str, Any]:
    made: dict[str, dict[int, Forward]] = {}
    counts: dict[str, dict[int, Any]] = {}
    for name, own in builders(device).items():
        if not re.search(only, name):
            continue
        made[name], counts[name] = {}, {}
        for depth, make in own.items():
            model, forward = make()
            with graphs_run() as codes:
                forward().backward()
            counts[name][depth] = by_phase(codes)
            trained = sum(weight.requires_grad for weight in model.parameters())
            counts[name][depth]["backward"]["gradients"] = trained
            for _ in range(FIRST_STEPS - 1):
                forward().backward()
            made[name][depth] = forward
            print(f"{name}, depth {depth}: {counts[name][depth]}", flush=True)
    gc.collect()
    gc.freeze()  # what dynamo holds takes a second to look through, which each turn would
    return {
        name: {
            depth: {phase: {"seconds": seconds[phase], "launched": counts[name][depth][phase]} for phase in PHASES}
            for depth, seconds in by_depth.items()
        }
        for name, by_depth in in_turns(made, device).items()
    }


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="a regular expression of names")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.write_text(json.dumps(measured(device, given.only)))


if __name__ == "__main__":
    main()
