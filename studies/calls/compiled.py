"""Measures what the launches of compiled graphs cost the host, by what is launched.

    python -m studies.calls.compiled OUT.json      measures, on a GPU, in a process of its own
    python -m studies.calls.compiled               what the committed processes say

Stacks of two depths of each kind of layer, compiled as a whole with their loss, under autocast in bf16; tiny Qwen3s,
which calibrate a host; and models that are held out, image models whole; some also without a backward. They take turns,
on an idle device. OUT.json gets by name and depth the seconds of each phase and round, what its graphs launch there by
kind, and the tensors that the graphs are given.

Of each process what a launch costs, a tensor given, a gradient and the calls of some libraries is fitted to the stacks
and the Qwen3s. The means of five processes, over a launch, are the constants of `gpu.profile.host_graphs`.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flopcast.microbench import zoo
from flopcast.microbench.images import named
from flopcast.microbench.recipe.compiling import FIRST_STEPS, body_of, compile_model, counts_of, graphs_run
from flopcast.microbench.recipe.inference import build_inference
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build, build_module
from flopcast.roofline.gpu.profile.host_graphs import (
    ENTERING,
    GIVEN,
    GRADIENT,
    HEAVIER_CALLS,
    OF_INFERENCE,
    Calls,
    fit_graph_costs,
)
from flopcast.roofline.stream.model.models import Config, load_config, make_config, with_depth
from studies.calls.convolutions import CHANNELS, IMAGES, LAYERS, SIZE, TOKENS
from studies.calls.turns import PHASES, ByDepth, Forward, in_turns
from studies.command import parser_of
from studies.imports import ROOT

Made = tuple[nn.Module, Forward]  # a model, and what runs its forward

# Of two machines three processes each, one of a third, six of a fourth.
FOLDER = ROOT / "reports" / "nvidia-h200" / "compiled-validation" / "calls"
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


# Calls of inference: models, and what is called of them.
CALLS = {
    f"{name}/{phase}": (config, phase)
    for name, config in {
        "qwen3": make_config(width=256, depth=2, vocab=1024),
        "gpt2": load_config("gpt2") | {"vocab_size": 1024},
        "llama": load_config("llama-3.2-1b") | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024,
                                                "num_attention_heads": 8, "num_key_value_heads": 2},
    }.items()
    for phase in ("prefill", "decode")
}  # fmt: skip


def of_call(config: Config, phase: str, depth: int, device: torch.device) -> Made:
    recipe = Recipe(batch=2, precision="bf16", phase=phase, context=64, mode="compile")
    step = build_inference(with_depth(config, depth), device, recipe)
    model = with_own_code(step.model)
    compile_model(step, "compile")
    return without_gradients((model, step.run))


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
        return loss.sum() + nothing

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
    for name, (config, phase) in CALLS.items():
        found[name] = {depth: partial(of_call, config, phase, depth, device) for depth in DEPTHS_OF_MODELS}
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
    body = body_of(code)
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


def measure(device: torch.device, out: Path, only: str = "") -> None:
    """Writes to `out` what there is after each round, so that a run which is cut short keeps it."""
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

    def write(timed: dict[str, ByDepth]) -> None:
        told = {
            name: {
                depth: {phase: {"seconds": seconds[phase], "launched": counts[name][depth][phase]} for phase in PHASES}
                for depth, seconds in by_depth.items()
            }
            for name, by_depth in timed.items()
        }
        out.write_text(json.dumps(told))

    in_turns(made, device, write)


# --- what the committed processes say

COSTS = (
    "launch", "given", "gradient", "convolution", "convolution in NHWC", "convolution_backward", "attention",
    "attention_backward", "forward", "backward",
)  # fmt: skip
FITTED = re.compile(r"^(?:conv|depthwise|norm|linear(?:-\w+)?|scale)/n[ch]|^qwen3$")  # names; all others are held out
HELD_OUT = ("gpt2", "vit", *MODULES)
_BESIDE = ("tensors", "checks", "made", "gradients")  # counted, but no launches
_CUDNN = "_scaled_dot_product_cudnn_attention"


class Row(NamedTuple):
    """A phase of a stack or a model in one process: a layer more, or all of it; how often it has each of COSTS."""

    name: str
    phase: str
    is_layer: bool
    seconds: float
    counts: tuple[float, ...]

    def cost(self, costs: Sequence[float]) -> float:
        """Its seconds by these costs."""
        return sum(cost * count for cost, count in zip(costs, self.counts, strict=True))


def rows_of(file: Path) -> list[Row]:
    """The rows of one process: of each model its least depth, and what a layer adds."""
    found = []
    for name, by_depth in json.loads(file.read_text()).items():
        depths = sorted(by_depth, key=int)
        for phase in PHASES:
            few, many = by_depth[depths[0]][phase], by_depth[depths[-1]][phase]
            seconds = median(few["seconds"])
            counts = counted(name, phase, few["launched"])
            found.append(Row(name, phase, False, seconds, counts))
            if len(depths) > 1:
                layers = int(depths[-1]) - int(depths[0])
                more = counted(name, phase, many["launched"])
                added = tuple((high - low) / layers for low, high in zip(counts, more, strict=True))
                found.append(Row(name, phase, True, (median(many["seconds"]) - seconds) / layers, added))
    return found


def counted(name: str, phase: str, launched: Mapping[str, int]) -> tuple[float, ...]:
    """How often a phase has each of COSTS. Depthwise convolutions, and all of models in NHWC, count as in NHWC."""
    convolutions = launched.get("convolution", 0)
    is_dense_nchw = "nhwc" not in name and not name.startswith(("depthwise", "convnext"))
    return (
        sum(count for kind, count in launched.items() if kind not in _BESIDE),
        launched.get("tensors", 0) if phase == "forward" else 0,
        launched.get("gradients", 0) if phase == "backward" else 0,
        convolutions if is_dense_nchw else 0, 0 if is_dense_nchw else convolutions,
        launched.get("convolution_backward", 0), launched.get(_CUDNN, 0), launched.get(f"{_CUDNN}_backward", 0),
        phase == "forward", phase == "backward",
    )  # fmt: skip


def fitted(rows: Iterable[Row]) -> tuple[float, ...]:
    """Seconds of each of COSTS by the rows of FITTED: the sum of squared relative errors is least."""
    import numpy as np
    from scipy.optimize import nnls

    own = [row for row in rows if FITTED.search(row.name)]
    shares = np.array([row.counts for row in own], float) / np.array([row.seconds for row in own])[:, None]
    return tuple(map(float, nnls(shares, np.ones(len(own)))[0]))


def files() -> list[Path]:
    """Those of all processes, of three machines."""
    return sorted(FOLDER.glob("*/*.json"))


def in_launches() -> dict[str, list[float]]:
    """By cost its seconds over a launch's, of each process that can tell it: one that ran all but a few kinds."""
    found: dict[str, list[float]] = {cost: [] for cost in COSTS}
    for file in files():
        rows = [row for row in rows_of(file) if FITTED.search(row.name)]
        if not any(row.name.startswith("scale") for row in rows):
            continue
        costs = fitted(rows)
        for place, cost in enumerate(COSTS):
            if any(row.counts[place] for row in rows):
                found[cost].append(costs[place] / costs[0])
    return found


# In launches, by the constants that ship, each of COSTS but entering.
SHIPPED = (
    1.0, GIVEN, GRADIENT, *HEAVIER_CALLS["aten.convolution"], HEAVIER_CALLS["aten.convolution_backward"][0],
    HEAVIER_CALLS[f"aten.{_CUDNN}"][0], HEAVIER_CALLS[f"aten.{_CUDNN}_backward"][0], 0.0, 0.0,
)  # fmt: skip


INFERRED_MODELS = (*CALLS, *(f"{name}/{NO_GRADIENTS}" for name in CONFIGS))


def launch_of(rows: Iterable[Row]) -> float:
    """Seconds of a launch in a process: of a layer of a Qwen3's step over its launches, with what else costs some."""
    layers = [row for row in rows if row.name == "qwen3" and row.is_layer]
    return sum(row.seconds for row in layers) / sum(row.cost(SHIPPED) for row in layers)


def alone(file: Path) -> dict[str, float]:
    """What a launch costs in a layer of a model whose forward no backward follows, with all else that this costs, by
    model and kind of call: in launches of a step."""
    rows = rows_of(file)
    return {
        row.name: row.seconds / row.counts[0] / launch_of(rows)
        for row in rows
        if row.is_layer and row.name in INFERRED_MODELS and row.phase == "forward"
    }


def entering(file: Path) -> dict[tuple[str, str], float]:
    """What entering a graph costs in launches, by model and phase: all that the shallower model costs beyond them."""
    rows = rows_of(file)
    launch = launch_of(rows)
    return {
        (row.name, row.phase): row.seconds / launch - row.cost(SHIPPED)
        for row in rows
        if not row.is_layer and row.name in CONFIGS
    }


def entering_inference(file: Path) -> dict[str, float]:
    """What entering a graph of inference costs over that of the same model's forward that a backward follows, by model
    and kind of call."""
    rows, known = rows_of(file), entering(file)
    return {
        row.name: (row.seconds / launch_of(rows) - OF_INFERENCE * row.counts[0]) / known[model, "forward"]
        for row in rows
        if not row.is_layer
        and row.name in INFERRED_MODELS
        and row.phase == "forward"
        and ((model := row.name.partition("/")[0]), "forward") in known
    }


def phases_of_qwen3(rows: Sequence[Row]) -> list[tuple[Calls, float]]:
    """(calls, host seconds) of both phases of both depths of the process's Qwen3, which calibrate a user's host."""
    own = {(row.phase, row.is_layer): row for row in rows if row.name == "qwen3"}
    more = DEPTHS_OF_MODELS[1] - DEPTHS_OF_MODELS[0]
    found = []
    for phase in PHASES:
        low, layer = own[phase, False], own[phase, True]
        counts = tuple(few + more * each for few, each in zip(low.counts, layer.counts, strict=True))
        high = low._replace(seconds=low.seconds + more * layer.seconds, counts=counts)
        found += [(calls_of(row), row.seconds) for row in (low, high)]
    return found


def calls_of(row: Row) -> Calls:
    return Calls(row.cost(SHIPPED), *row.counts[-2:])


def noise_of(file: Path) -> float:
    """What the Qwen3's four phases are off by the three costs that are fitted to them, in logarithms: one degree of
    freedom is left."""
    phases = phases_of_qwen3(rows_of(file))
    costs = fit_graph_costs(phases)
    return math.sqrt(sum(math.log(costs.seconds(calls) / seconds) ** 2 for calls, seconds in phases))


def of_calibrated(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Errors of whole models that were held out, by the constants that ship and a host that the process's Qwen3s
    calibrate, as a user's is."""
    costs = fit_graph_costs(phases_of_qwen3(rows), entering=ENTERING)
    return {
        (row.name, row.phase): costs.seconds(calls_of(row)) / row.seconds - 1
        for row in rows
        if row.name in HELD_OUT and not row.is_layer
    }


def tell() -> None:
    for cost, values in in_launches().items():
        told = ", ".join(f"{value:.2f}" for value in values)
        print(f"{cost}: {fmean(values):.2f} launches ({told})")
    for file in files():
        if calls := alone(file):
            told = ", ".join(f"{name} {launches:.2f}" for name, launches in calls.items())
            print(f"{file.parent.name}/{file.stem}, a launch of a forward without gradients, in launches: {told}")
            told = ", ".join(f"{name} {share:.2f}" for name, share in entering_inference(file).items())
            print(f"{file.parent.name}/{file.stem}, entering it, over that of a step's forward: {told}")
        told = ", ".join(f"{name} {phase} {launches:.1f}" for (name, phase), launches in entering(file).items())
        print(f"{file.parent.name}/{file.stem}, entering a graph, in launches: {told}")
        errors = ", ".join(
            f"{name} {phase} {error:+.0%}" for (name, phase), error in of_calibrated(rows_of(file)).items()
        )
        print(f"{file.parent.name}/{file.stem}, held out: {errors}")


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="a regular expression of the names to measure")
    given = parser.parse_args()
    if given.out is None:
        tell()
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measure(device, given.out, given.only)


if __name__ == "__main__":
    main()
