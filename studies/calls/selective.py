"""Measures what selective checkpointing costs the host, whose Python sees each call of a layer twice.

    python -m studies.calls.selective OUT.json      measures, on a GPU, in a process of its own
    python -m studies.calls.selective               what the committed processes say

Tiny models of two depths, of Qwen3 and, held out, of GPT-2, that checkpoint nothing, whole layers, or all but their
costliest results. They take turns on an idle device; what a layer costs is the slope from one depth to the other.
OUT.json gets {"MODEL/CHECKPOINT": {"forward", "backward"}: seconds per layer of each round}.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from flopcast.microbench.recipe.settings import CHECKPOINTS, Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Op, Stream
from studies.calls.counts import weighted
from studies.calls.turns import PHASES, in_turns, per_layer
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "checkpoints" / "host-calls"
DEPTHS = (2, 6)
CONFIGS = {"qwen3": make_config(width=256, depth=2), "gpt2": load_config("gpt2")}
SIZES: dict[str, dict[str, Any]] = {"qwen3": {"batch": 4, "seq": 256}, "gpt2": {"batch": 1, "seq": 64}}
JUDGES = "gpt2"


def measured(device: torch.device) -> dict[str, dict[str, list[float]]]:
    made = {
        f"{model}/{checkpoint}": {
            depth: build(with_depth(config, depth), device, Recipe(checkpoint=checkpoint, **SIZES[model])).forward
            for depth in DEPTHS
        }
        for model, config in CONFIGS.items()
        for checkpoint in CHECKPOINTS
    }
    return {
        name: {phase: per_layer(by_depth, phase) for phase in PHASES}
        for name, by_depth in in_turns(made, device).items()
    }


class Calls(NamedTuple):
    """Calls of a layer as traced: `weighted`, views by what they cost, and `seen`, which torch's modes see alike."""

    weighted: float
    seen: int


@cache
def calls_of_layer(model: str, checkpoint: str) -> dict[str, Calls]:
    """Of the forward, of the backward itself, and of what the backward computes again ("again")."""
    run = Run(checkpoint=checkpoint, **SIZES[model])
    low, high = (_calls(get_stream(with_depth(CONFIGS[model], depth), run.traced_on("cuda"))) for depth in DEPTHS)
    layers = DEPTHS[1] - DEPTHS[0]
    return {
        name: Calls((high[name].weighted - low[name].weighted) / layers, (high[name].seen - low[name].seen) // layers)
        for name in high
    }


def _calls(stream: Stream) -> dict[str, Calls]:
    parts: dict[str, list[Op]] = {name: [] for name in (*PHASES, "again")}
    for op in stream.ops:
        if op.phase in PHASES and op.kind != "host":
            parts["again" if op.is_recomputed else op.phase].append(op)
    return {name: Calls(weighted(ops), len(ops)) for name, ops in parts.items()}


def beyond(told: dict[str, dict[str, list[float]]], model: str) -> dict[str, float]:
    """What each call that torch's modes see costs beyond one of a layer that checkpoints whole, in calls of a forward
    that checkpoints nothing: of the forward, and of what is computed again."""
    call = median(told[f"{model}/none"]["forward"]) / calls_of_layer(model, "none")["forward"].weighted
    seen = calls_of_layer(model, "selective")
    more = {phase: median(told[f"{model}/selective"][phase]) - median(told[f"{model}/full"][phase]) for phase in PHASES}
    parts = {"forward": "forward", "backward": "again"}
    return {part: more[phase] / seen[part].seen / call for phase, part in parts.items()}


def tell() -> None:
    processes = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
    for model in CONFIGS:
        each = [beyond(told, model) for told in processes]
        for part in each[0]:
            values = [one[part] for one in each]
            shown = ", ".join(f"{value:.2f}" for value in values)
            words = ", held out" if model == JUDGES else ""
            print(f"{model}{words}, {part}: {fmean(values):.2f} calls beyond its own ({shown})")


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    options = parser.parse_args()
    if options.out is None:
        tell()
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.write_text(json.dumps(measured(device), indent=1) + "\n")


if __name__ == "__main__":
    main()
