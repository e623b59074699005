"""Measures what calls of convolutional networks cost the host beyond other calls, layer by layer.

    python -m studies.calls.convolutions OUT.json      measures, on a GPU, in a process of its own
    python -m studies.calls.convolutions               what the committed processes say

Stacks of two depths of each kind of layer, under autocast in bf16 as image models train, and tiny models of two depths:
Qwen3, whose calls calibrate a host, ViT and GPT-2. They take turns, on an idle device; what a layer costs is the slope
from one depth to the other. OUT.json gets {"KIND/LAYOUT" or MODEL: {"forward", "backward"}: seconds per layer of each
round}. A convolution and a batch norm cost what stacks of them alone cost beyond the calls that are traced of them, in
calls of a Qwen3's same phase: `device_work.HEAVIER`. Stacks of convolution, norm and ReLU are held out, and so are all
rows of another machine (AGAIN) and the layers of whole models there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import nn

from flopcast.microbench import zoo
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build, build_module
from flopcast.roofline.stream.library.modules import module_stream
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config, load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.calls.counts import weighted
from studies.calls.turns import PHASES, in_turns, per_layer
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "images" / "host-calls"
AGAIN = FOLDER / "again"  # three processes of another machine, to which nothing is fitted; with whole models
LOW, HIGH = 4, 20
CHANNELS, SIZE, IMAGES = 32, 8, 4

LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "conv": lambda: [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)],
    "conv-bias": lambda: [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)],
    "pointwise": lambda: [nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)],
    "depthwise": lambda: [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)],
    "norm": lambda: [nn.BatchNorm2d(CHANNELS)],
    "conv-norm": lambda: [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS)],
    "conv-norm-relu": lambda: [
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True),
    ],
    "relu": lambda: [nn.ReLU()],
    "linear": lambda: [nn.Linear(SIZE, SIZE, bias=False)],
}  # fmt: skip
# Of a transformer for images: layers of one layout, and of whole models of two depths.
TOKENS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear-bias": lambda: [nn.Linear(SIZE, SIZE)],
    "layer-norm": lambda: [nn.LayerNorm(SIZE)],
    "gelu": lambda: [nn.GELU()],
    "linear-gelu": lambda: [nn.Linear(SIZE, SIZE), nn.GELU()],
}


def stacked(kind: str, layout: str, depth: int, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Layers on top of each other, and a batch for them."""
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    layers = [layer for _ in range(depth) for layer in (LAYERS | TOKENS)[kind]()]
    model = nn.Sequential(*layers).to(device)
    model = model.to(memory_format=memory)  # type: ignore[call-overload]  # torch's stubs lack this keyword alone
    images = torch.randn(IMAGES, CHANNELS, SIZE, SIZE, device=device).to(memory_format=memory)
    return model, images.requires_grad_()


def stack(kind: str, layout: str, depth: int, device: torch.device) -> Callable[[], torch.Tensor]:
    model, images = stacked(kind, layout, depth, device)

    def forward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            found: torch.Tensor = model(images)
        return found.float().sum()

    return forward


class Model(NamedTuple):
    """A whole model by its depth: a forward that runs on a device, and the training step as it is traced."""

    runs: Callable[[int, torch.device], Callable[[], torch.Tensor]]
    traced: Callable[[int], Stream]


def _of_config(config: Config, batch: int, seq: int) -> Model:
    return Model(
        lambda depth, device: build(with_depth(config, depth), device, Recipe(batch=batch, seq=seq)).forward,
        lambda depth: get_stream(with_depth(config, depth), Run(batch=batch, seq=seq).traced_on("cuda")),
    )


def _vit(depth: int) -> zoo.ModuleAndBatch:
    return zoo.vit_b16(batch=2, size=64, layers=depth, width=128)


def _vit_traced(depth: int) -> Stream:
    model, batch = _vit(depth)
    return module_stream(model, Run(), "cuda", batch=batch)


DEPTHS = (2, 6)
MODELS = {
    "qwen3": _of_config(make_config(width=256, depth=2), batch=4, seq=256),
    "vit": Model(lambda depth, device: build_module(*_vit(depth), device, Recipe()).forward, _vit_traced),
    "gpt2": _of_config(load_config("gpt2"), batch=1, seq=64),
}


def measured(device: torch.device) -> dict[str, dict[str, list[float]]]:
    kinds = [(kind, layout) for kind in LAYERS for layout in ("nchw", "nhwc")] + [(kind, "nchw") for kind in TOKENS]
    made: dict[str, dict[int, Callable[[], torch.Tensor]]] = {
        f"{kind}/{layout}": {depth: stack(kind, layout, depth, device) for depth in (LOW, HIGH)}
        for kind, layout in kinds
    }
    for name, model in MODELS.items():
        made[name] = {depth: model.runs(depth, device) for depth in DEPTHS}
    return {
        name: {phase: per_layer(by_depth, phase) for phase in PHASES}
        for name, by_depth in in_turns(made, device).items()
    }


def traced_calls(kind: str, layout: str, phase: str) -> float:
    """Calls per layer as traced, views by their weight."""
    counts = []
    for depth in (2, 3):
        torch.manual_seed(0)
        model, images = stacked(kind, layout, depth, torch.device("cpu"))
        stream = module_stream(model, Run(), "cuda", batch=images, loss_fn=lambda found: found.float().sum())
        counts.append(calls_of(stream, phase))
    return counts[1] - counts[0]


def calls_of(stream: Stream, phase: str) -> float:
    return weighted(op for op in stream.ops if op.phase == phase)


@cache
def calls_of_layer(model: str, phase: str) -> float:
    """Calls per layer of a whole model as traced."""
    low, high = (calls_of(MODELS[model].traced(depth), phase) for depth in DEPTHS)
    return (high - low) / (DEPTHS[1] - DEPTHS[0])


def measured_calls(name: str, phase: str, folder: Path = FOLDER) -> list[float]:
    """What a layer of a stack or of a model costs, in calls of a Qwen3's same phase, by process."""
    found = []
    for file in sorted(folder.glob("*.json")):
        told = json.loads(file.read_text())
        call = median(told["qwen3"][phase]) / calls_of_layer("qwen3", phase)
        found.append(median(told[name][phase]) / call)
    return found


def beyond(kind: str, layout: str, phase: str) -> tuple[float, list[float]]:
    """Calls of a layer beyond those that are traced, of the phase's own cost: those traced, and of each process."""
    traced = traced_calls(kind, layout, phase)
    return traced, [calls - traced for calls in measured_calls(f"{kind}/{layout}", phase)]


def fitted() -> dict[tuple[str, str, str], float]:
    """Calls beyond one, by what is called ("conv", "norm"), layout and phase."""
    return {
        (kind, layout, phase): fmean(beyond(kind, layout, phase)[1])
        for kind in ("conv", "norm")
        for layout in ("nchw", "nhwc")
        for phase in PHASES
    }


def again(layout: str, phase: str) -> list[float]:
    """Calls of the stack that was held out, on the other machine."""
    return measured_calls(f"conv-norm-relu/{layout}", phase, AGAIN)


def tell() -> None:
    found = fitted()
    for (kind, layout, phase), calls in found.items():
        print(f"{kind}, {layout}, {phase}: {calls:.1f} calls beyond those traced")
    for layout in ("nchw", "nhwc"):
        for phase in PHASES:
            traced, more = beyond("conv-norm-relu", layout, phase)
            own = traced + found["conv", layout, phase] + found["norm", layout, phase]
            print(
                f"held out, conv-norm-relu, {layout}, {phase}: {traced:.1f} traced, {own:.1f} forecast, "
                f"{traced + fmean(more):.1f} measured, {fmean(again(layout, phase)):.1f} on another machine"
            )
    for name, phase in product(("vit", "gpt2"), PHASES):
        told = ", ".join(f"{calls:.1f}" for calls in measured_calls(name, phase, AGAIN))
        print(f"a layer of {name}, {phase}: {calls_of_layer(name, phase):.1f} traced, {told} measured")


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    out: Path | None = parser.parse_args().out
    if out is None:
        tell()
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measured(device)
    out.write_text(json.dumps(found))
    for name, phases in found.items():
        print(f"{name}: " + ", ".join(f"{phase} {median(values) * 1e6:.1f} us" for phase, values in phases.items()))


if __name__ == "__main__":
    main()
