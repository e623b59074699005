"""Runs a few steps for a minute each: whether a step takes as long after a minute, when the card is hot, as in the
first seconds, which is what `validate` times.

    python -m studies.power.steady OUT [NAME,...] [--seconds 60]     OUT/NAME.json, on a GPU
    python -m studies.power.steady                                   what the committed ones say, beside the forecast

OUT/NAME.json holds the settings of the step and, of each two seconds, the seconds per step, the mean watts and the mean
clock of the multiprocessors (None where the GPU does not tell), and the temperature at their end, in degrees Celsius.
The model is Llama 3.1 8B with fewer layers, as torchtitan trains it, compiled and eager.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.timing.telemetry import telemetry
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.run import Run
from studies.command import parser_of
from studies.imports import ROOT
from studies.power.watch import Watch

FOLDER = ROOT / "reports" / "nvidia-h200" / "power-limit" / "steady"
SECONDS, WINDOW, COOL_SECONDS = 60.0, 1.0, 15.0  # a window is run once before it counts
LAYERS = 8
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


def _llama(mode: str) -> StepPlan:
    return StepPlan(
        name=f"llama-3.1-8b-d{LAYERS}-{mode}", config=LLAMA, batch=2, seq=8192, optimizer="adamw-fused", clip=1.0,
        checkpoint="selective", mode=mode,
    )  # fmt: skip


PLANS = {plan.name: plan for plan in (_llama("compile"), _llama("eager"))}


def measured(plan: StepPlan, seconds: float) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    step = build_plan(plan, device)
    for _ in range(3):
        loss = step.run()
    torch.cuda.synchronize()
    watch, read = Watch(), telemetry(device)
    time.sleep(COOL_SECONDS)
    cool = read().temperature_c
    began, windows = time.perf_counter(), []
    while (passed := time.perf_counter() - began) < seconds:
        windows.append(
            {"at": round(passed, 1), **asdict(watch.in_a_row(step.run, WINDOW)), "celsius": read().temperature_c}
        )
    row = {
        "name": plan.name, "mode": plan.mode, "batch": plan.batch, "seq": plan.seq, "cool_celsius": cool,
        "loss": float(loss), "windows": windows,
    }  # fmt: skip
    print(row["name"], windows[0], windows[-1], flush=True)
    return row


def tell() -> None:
    profile = find_profile("nvidia-h200")
    for file in sorted(FOLDER.glob("*.json")):
        row = json.loads(file.read_text())
        plan, windows = PLANS[row["name"]], row["windows"]
        found = forecast(plan.config, Run(**plan.settings), profile)
        first, last = (median(one["seconds"] for one in some) for some in (windows[:3], windows[-5:]))
        print(
            f"{plan.name}: first {first * 1e3:.1f} ms, after {windows[-1]['at']:.0f} s {last * 1e3:.1f} "
            f"({last / first - 1:+.1%}), forecast {found.step_seconds * 1e3:.1f} "
            f"({found.step_seconds / last - 1:+.1%}); "
            f"{windows[0]['watts']:.0f} to {windows[-1]['watts']:.0f} W (forecast {found.power_watts:.0f}), "
            f"{windows[0]['mhz']:.0f} to {windows[-1]['mhz']:.0f} MHz, {row['cool_celsius']:.0f} to "
            f"{windows[-1]['celsius']:.0f} degrees Celsius"
        )


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("names", nargs="?", default=",".join(PLANS), help="with commas between (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    if options.out is None:
        tell()
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names.split(","):
        (options.out / f"{name}.json").write_text(json.dumps(measured(PLANS[name], options.seconds), indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
