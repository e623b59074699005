"""Trains a few layers with products in fp8, as torchao runs them, beside bf16: times, kernels, memory and losses.

    python -m studies.fp8_training OUT [--budget S] [--tiny]

Writes a line per step to OUT/fp8_training.jsonl, those that it holds already left out. The linear layers within the
model, but the output layer, are torchao's `Float8Linear`, by its recipes: operands with one scale a tensor
("tensorwise") or a row ("rowwise"), found anew at every product. Times of all steps come first, since launches cost
more after a profile. Each step's first losses, on one batch, are kept: an fp8 step whose first loss is off from that in
bf16 by more than FIRST_LOSS, or whose losses do not fall, is wrong.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flopcast.microbench.recipe.compiling import compile_model, forget
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build
from flopcast.microbench.steps.measure import profile_step, time_step
from flopcast.microbench.timing.allocator import settle_allocator
from flopcast.microbench.timing.device import pick_device
from flopcast.roofline.stream.model.models import load_config, make_config
from studies.command import parser_of

RECIPES = ("bf16", "tensorwise", "rowwise")
FIRST_LOSS = 0.01  # relative, of an untrained model's first step
LOSSES = 6  # steps whose losses are kept
NAME = 120  # characters of a kernel's name


@dataclass(frozen=True)
class Plan:
    """One step. `layers`: of the model's own, 0 for all."""

    model: str
    layers: int
    batch: int
    seq: int
    recipe: str
    mode: str = "eager"
    precision: str = "autocast-bf16"
    optimizer: str = "adamw-fused"


# (model, layers, batch, seq): few layers, since all of a model are alike and compiling takes minutes otherwise.
SIZES = (("qwen3-0.6b", 6, 8, 1024), ("qwen3-1.7b", 6, 4, 2048), ("qwen3-4b", 6, 4, 2048), ("qwen3-8b", 4, 4, 2048))
TINY = (("tiny", 2, 2, 32),)


def plans(tiny: bool) -> list[Plan]:
    """Eager ones first, then compiled ones, then a whole model."""
    sizes = TINY if tiny else SIZES
    found = [Plan(*size, recipe, mode) for mode in ("eager", "compile") for size in sizes for recipe in RECIPES]
    if not tiny:
        found += [Plan("qwen3-1.7b", 6, 4, 2048, recipe, "compile", "bf16") for recipe in RECIPES]
        found += [Plan("qwen3-0.6b", 0, 8, 1024, recipe) for recipe in RECIPES]
    return found


def main() -> None:
    """Times every step, then profiles every step."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing is begun")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of two narrow layers, which a processor trains too"
    )
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    path, device, end = asked.out / "fp8_training.jsonl", pick_device(None), time.monotonic() + asked.budget
    settle_allocator(device)
    for part in ("times", "kernels"):
        done = {name_of(row) for row in read(path) if row["status"] == "ok"}
        for plan in plans(asked.tiny):
            fields = {**asdict(plan), "part": part}
            if name_of(fields) in done or time.monotonic() > end:
                continue
            start = time.monotonic()
            row = {**fields, **measured(plan, part, device), "spent_seconds": time.monotonic() - start}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                *asdict(plan).values(), part, row["status"], row.get("seconds"), row.get("device_seconds"), flush=True
            )


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none where it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row was measured of."""
    return tuple(row[name] for name in (*Plan.__dataclass_fields__, "part"))


def measured(plan: Plan, part: str, device: torch.device) -> dict[str, Any]:
    """The fields of one row; a failure is one too."""
    step = None
    try:
        step = made(plan, device)
        return {"status": "ok", **(times_of(step) if part == "times" else kernels_of(step))}
    except Exception as error:
        return {"status": "error", "reason": f"{type(error).__name__}: {error}"[:400]}
    finally:
        del step
        forget(plan.mode)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def made(plan: Plan, device: torch.device) -> TrainingStep:
    """Builds a step: the same weights and tokens for every recipe."""
    config = make_config(width=64, depth=2, vocab=256) if plan.model == "tiny" else load_config(plan.model)
    config = {**config, "num_hidden_layers": plan.layers or config["num_hidden_layers"]}
    config.pop("layer_types", None)
    recipe = Recipe(batch=plan.batch, seq=plan.seq, precision=plan.precision, optimizer=plan.optimizer)
    step = build(config, device, recipe)
    if plan.recipe != "bf16":
        convert(step.model, plan.recipe, emulate=device.type != "cuda")
    compile_model(step, plan.mode)
    return step


def convert(model: torch.nn.Module, recipe: str, emulate: bool) -> None:
    """Puts torchao's linear layers in the place of all but the output layer; parameters stay the same tensors."""
    float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(
        model, config=replace(config, emulate=emulate), module_filter_fn=lambda _, name: not name.endswith("lm_head")
    )
    converted = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    if not converted:
        raise ValueError("no layer was converted")


def times_of(step: TrainingStep) -> dict[str, Any]:
    """Losses of the first steps, then wall-clock times and memory."""
    losses = [float(step.run()) for _ in range(LOSSES)]
    timing = time_step(step, rounds=5, steps_per_round=5, warm_up=2)
    return {
        "losses": losses, "seconds": statistics.median(timing.step_seconds), "samples": timing.step_seconds,
        "host_seconds": statistics.median(timing.host_seconds), "peak_bytes": timing.peak_bytes,
        "optimizer_host_seconds": statistics.median(timing.optimizer_seconds),
        "layers_converted": sum(type(module).__name__ == "Float8Linear" for module in step.model.modules()),
    }  # fmt: skip


def kernels_of(step: TrainingStep) -> dict[str, Any]:
    """Device time of a step, and its kernels by name: [calling operator, number, seconds]."""
    found = profile_step(step)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for kernel in found.kernels:
        entry = by_name[kernel.op, kernel.name[:NAME]]
        entry[0] += 1
        entry[1] += kernel.seconds
    return {
        "device_seconds": statistics.median(found.device_seconds) if found.device_seconds else None,
        "n_kernels": len(found.kernels),
        "kernels": [[op, name, *entry] for (op, name), entry in by_name.items()],
    }


def compared(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
    """(fp8 row, its row in bf16, whether its losses agree) of every timed step."""
    times = {name_of(row): row for row in rows if row["status"] == "ok" and row["part"] == "times"}
    for row in times.values():
        beside = times.get(name_of({**row, "recipe": "bf16"}))
        if row["recipe"] != "bf16" and beside is not None:
            ours, theirs = row["losses"], beside["losses"]
            agrees = abs(ours[0] / theirs[0] - 1) < FIRST_LOSS and ours[-1] < ours[0]
            yield row, beside, agrees


if __name__ == "__main__":
    main()
