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

import torch

from flopcast.microbench.recipe.settings import CHECKPOINTS, Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from studies.calls.counts import weighted
from studies.calls.turns import PHASES, in_turns, per_layer
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "checkpoints" / "host-calls"
DEPTHS = (2, 6)
CONFIGS = {"qwen3": make_config(width=256, depth=2), "gpt2": load_config("gpt2")}
SIZES = {"qwen3": {"batch": 4, "seq": 256}, "gpt2": {"batch": 1, "seq": 64}}
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


@cache
def calls_of_layer(model: str, checkpoint: str) -> dict[str, float]:
    """Calls that a layer makes as traced, views by their weight: of the forward, of the backward itself, and of what
    it computes again."""
    found = dict.fromkeys((*PHASES, "again"), 0.0)
    run = Run(checkpoint=checkpoint, **SIZES[model])
    for depth, sign in zip(DEPTHS, (-1, 1), strict=True):
        for op in get_stream(with_depth(CONFIGS[model], depth), run.traced_on("cuda")).ops:
            name = "again" if op.is_recomputed else op.phase
            if name in found:
                found[name] += sign * weighted([op]) / (DEPTHS[1] - DEPTHS[0])
    return found


def costs(told: dict[str, dict[str, list[float]]], model: str, checkpoint: str) -> tuple[float, float]:
    """What a call of the forward costs, and one that the backward repeats, over a call of a forward that checkpoints
    nothing."""
    plain, calls = calls_of_layer(model, "none"), calls_of_layer(model, checkpoint)
    own = median(told[f"{model}/none"]["forward"]) / plain["forward"]
    backward = median(told[f"{model}/none"]["backward"]) / plain["backward"] * calls["backward"]
    found = {phase: median(told[f"{model}/{checkpoint}"][phase]) for phase in PHASES}
    return found["forward"] / calls["forward"] / own, (found["backward"] - backward) / calls["again"] / own


def tell() -> None:
    processes = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
    for model in CONFIGS:
        for checkpoint in list(CHECKPOINTS)[1:]:
            each = [costs(told, model, checkpoint) for told in processes]
            words = ", held out" if model == JUDGES else ""
            for name, values in zip(("of the forward", "computed again"), zip(*each, strict=True), strict=True):
                shown = ", ".join(f"{value:.2f}" for value in values)
                print(f"{model}, {checkpoint}{words}: a call {name} {fmean(values):.2f} plain ones ({shown})")


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
