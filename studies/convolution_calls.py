"""Measures what calls of convolutional networks cost the host, layer by layer, beside those of a Qwen3.

    python -m studies.convolution_calls OUT.json

Stacks of two depths of each kind of layer, under autocast in bf16 as image models train, and of tiny Qwen3s, whose
calls calibrate a host. They take turns, on an idle device; what a layer costs is the slope from one depth to the other.
OUT.json gets {"KIND/LAYOUT": {"forward", "backward"}: seconds per layer of each round}; `qwen3` is a layer of Qwen3.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.microbench.timing.timer import synchronise
from flopcast.roofline.stream.model.models import make_config
from studies.command import parser_of

LOW, HIGH = 4, 20
CHANNELS, SIZE, IMAGES = 32, 8, 4
ROUNDS, STEPS = 8, 5

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


def phases_of(forward: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Host seconds of a forward and a backward on an idle device."""
    synchronise(device)
    start = time.perf_counter()
    loss = forward()
    middle = time.perf_counter()
    synchronise(device)
    again = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    synchronise(device)
    return middle - start, end - again


def stack(kind: str, layout: str, depth: int, device: torch.device) -> Callable[[], torch.Tensor]:
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    layers = [layer for _ in range(depth) for layer in LAYERS[kind]()]
    model = nn.Sequential(*layers).to(device=device, memory_format=memory)
    images = torch.randn(IMAGES, CHANNELS, SIZE, SIZE, device=device).to(memory_format=memory).requires_grad_()

    def forward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            found: torch.Tensor = model(images)
        return found.float().sum()

    return forward


def qwen3(depth: int, device: torch.device) -> Callable[[], torch.Tensor]:
    step = build(make_config(width=256, depth=depth), device, Recipe(batch=4, seq=256))
    return step.forward


def measured(device: torch.device) -> dict[str, dict[str, list[float]]]:
    made: dict[str, dict[int, Callable[[], torch.Tensor]]] = {
        f"{kind}/{layout}": {depth: stack(kind, layout, depth, device) for depth in (LOW, HIGH)}
        for kind in LAYERS
        for layout in ("nchw", "nhwc")
    }
    made["qwen3"] = {depth: qwen3(depth, device) for depth in (2, 6)}
    for own in made.values():
        for forward in own.values():
            for _ in range(3):
                phases_of(forward, device)
    found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in made}
    for _ in range(ROUNDS):
        for name, own in made.items():
            gc.collect()
            with no_garbage_collection():
                times = {
                    depth: [phases_of(forward, device) for _ in range(STEPS)][1:] for depth, forward in own.items()
                }
            (low, few), (high, many) = sorted(times.items())
            for i, phase in enumerate(("forward", "backward")):
                more = median(one[i] for one in many) - median(one[i] for one in few)
                found[name][phase].append(round(more / (high - low), 8))
    return found


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measured(device)
    out.write_text(json.dumps(found))
    for name, phases in found.items():
        print(f"{name}: " + ", ".join(f"{phase} {median(values) * 1e6:.1f} us" for phase, values in phases.items()))


if __name__ == "__main__":
    main()
