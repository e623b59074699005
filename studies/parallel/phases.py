"""Measures what the ranks of a host spend on the phases of a step, by layout.

    torchrun --nproc-per-node 2 -m studies.parallel.phases OUT
    ... --only none,fsdp,tp                    tiny models of these layouts alone: another draw of both processes
    ... --only none,fsdp,none+lora,fsdp+lora,none+muon      also with adapters, and by Muon
    ... --device cpu                           on processors, over gloo, to try it
    python -m studies.parallel.phases OUT ... --keep NAME            puts launches on one host into its file of HOSTS

First tiny models of two depths, whose host seconds per layer and layout tell what a layout's Python costs in forward,
backward and optimizer; `none` is the same model that each rank runs for itself. Depths and layouts take turns, all
ranks at once. Then the steps of `studies.parallel.steps` that the device bounds, in a row: when a phase's last call
was enqueued and when the device was done with it. OUT gets rankN.json, written anew after each part.
`python -m studies.parallel.host` reads what is kept.
"""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.hosts.host import PHASES, host_phases
from flopcast.microbench.ranks.measure import meet
from flopcast.microbench.recipe.compiling import compile_model, forget
from flopcast.microbench.recipe.parallel_step import build_parallel, mesh_of
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build
from flopcast.roofline.stream.model.models import Config, make_config
from studies.command import parser_of
from studies.imports import ROOT
from studies.parallel.record import group_of
from studies.parallel.steps import LARGER, built

FOLDER = ROOT / "reports" / "parallel"
NONE = "none"
LAYOUTS = (NONE, "ddp={n}", "zero1={n}", "fsdp={n}", "zero2={n}", "tp={n}", "cp={n},fsdp=1")
# Trained otherwise, behind a "+": adapters, which give a layer 25 parameters for 11, and an optimizer of many calls.
OTHERWISE: dict[str, dict[str, Any]] = {
    "": {}, "lora": {"finetune": "lora"}, "muon": {"optimizer": "muon"},
}  # fmt: skip
TRAINED = (f"{NONE}+lora", "ddp={n}+lora", "fsdp={n}+lora", f"{NONE}+muon")
COMPILED = (NONE, "ddp={n}", "fsdp={n}")
DEPTHS = (2, 6)
ROUNDS, STEPS_PER_ROUND = 6, 4
IN_A_ROW = 6


@dataclass(frozen=True)
class Host:
    """A host whose launches were kept. `said`: its GPUs and the day, in words. `judges`: whether no constant is fitted
    to it. To any other host those constants are fitted whose layouts it ran (`studies.parallel.host.hosts_of`)."""

    file: Path
    said: str
    judges: bool = False


HOSTS = (
    Host(FOLDER / "phases.json.gz", "two H200s, 25 November 2026"),
    Host(FOLDER / "phases-2.json.gz", "two H200s, 26 November 2026; tiny models of some layouts"),
    Host(FOLDER / "phases-3.json.gz", "four H100s, 26 November 2026; tiny models of some layouts"),
    Host(FOLDER / "phases-4.json.gz", "two H200s, 26 November 2026", judges=True),
    Host(FOLDER / "phases-5.json.gz", "two H200s, 28 November 2026; with adapters and by Muon too", judges=True),
)


def tiny_config(depth: int) -> Config:
    return make_config(width=256, depth=depth, heads=4, kv_heads=4, head_dim=64)


def settings_of(layout: str, ranks: int) -> dict[str, Any]:
    """What a `Recipe` says of a tiny model: its layout, or none, and how it is trained."""
    layout, _, trained = layout.partition("+")
    return {"optimizer": "adamw-fused", "parallel": layout.format(n=ranks), **OTHERWISE[trained]}


def tiny(layout: str, depth: int, mode: str, device: str) -> TrainingStep:
    config: Config = {**tiny_config(depth), **({} if device == "cuda" else {"vocab_size": 512})}
    settings = settings_of(layout, dist.get_world_size())
    recipe = Recipe(batch=4, seq=256 if device == "cuda" else 32, mode=mode, **settings)
    torch.manual_seed(0)
    if not recipe.is_parallel:
        step = build(config, device, recipe)
        compile_model(step, mode)
    else:
        divided = recipe.layout
        made = build_parallel(config, divided, mesh_of(divided, device), device, recipe)
        assert isinstance(made, TrainingStep)
        step = made
    for _ in range(3):
        step.run()
    return step


def measure_tiny(layouts: tuple[str, ...], mode: str, device: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Keeps {"layout", "depth", "mode", "phases": {phase: [seconds]}} of each tiny model."""
    is_cuda = device == "cuda"
    steps: dict[tuple[str, int], TrainingStep] = {}
    for layout in layouts:
        for depth in DEPTHS:
            forget(mode)
            try:
                steps[layout, depth] = tiny(layout, depth, mode, device)
            except (RuntimeError, ValueError, NotImplementedError) as fault:
                keep({"layout": layout, "depth": depth, "mode": mode, "fault": str(fault)[:300]})
            if mode != "eager":  # one at a time, since dynamo forgets what it compiled for another
                for one, own in [(key, steps.pop(key)) for key in list(steps)]:
                    keep(_told(one, mode, [_round(own, is_cuda) for _ in range(ROUNDS)]))
    found: dict[tuple[str, int], list[list[dict[str, float]]]] = {key: [] for key in steps}
    for _ in range(ROUNDS):
        for key, step in steps.items():
            found[key].append(_round(step, is_cuda))
    for key, rounds in found.items():
        keep(_told(key, mode, rounds))


def _told(key: tuple[str, int], mode: str, rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    phases = {phase: [[round(one[phase], 7) for one in samples] for samples in rounds] for phase in (*PHASES, "step")}
    return {"layout": key[0], "depth": key[1], "mode": mode, "phases": phases}


def _round(step: TrainingStep, is_cuda: bool) -> list[dict[str, float]]:
    gc.collect()
    found = []
    with no_garbage_collection(), _within(step):
        for _ in range(STEPS_PER_ROUND):
            meet(is_cuda)
            found.append(host_phases(step, torch.device(step.device_type)))
    return found


def _within(step: Any) -> AbstractContextManager[Any]:
    """What a step runs its phases in: ring attention's division of the batch."""
    found: AbstractContextManager[Any] = nullcontext()
    return step._dividing_sequences() if hasattr(step, "_dividing_sequences") else found


def in_a_row(step: Any) -> list[dict[str, list[float]]]:
    """Of each of some steps in a row {"host", "device"}: seconds since the first began until zero_grad, forward,
    backward and optimizer were enqueued, and until the device had done them."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(5)] for _ in range(IN_A_ROW)]
    hosts: list[list[float]] = []
    gc.collect()
    with no_garbage_collection():
        meet(is_cuda=True)
        begin = time.perf_counter()
        for own in events:
            stamps = [time.perf_counter() - begin]
            own[0].record()
            step.zero_grad()
            own[1].record()
            stamps.append(time.perf_counter() - begin)
            loss = step.forward()
            own[2].record()
            stamps.append(time.perf_counter() - begin)
            step.backward(loss)
            own[3].record()
            stamps.append(time.perf_counter() - begin)
            step.optimizer_step()
            own[4].record()
            stamps.append(time.perf_counter() - begin)
            hosts.append(stamps)
        torch.cuda.synchronize()
    first = events[0][0]
    return [
        {"host": [round(s, 6) for s in stamps], "device": [round(first.elapsed_time(e) / 1e3, 6) for e in own]}
        for stamps, own in zip(hosts, events, strict=True)
    ]


def measure_larger(keep: Callable[[dict[str, Any]], None]) -> None:
    """Keeps {"step", "phases", "row"} of the steps that the device bounds whose ranks meet at every layer."""
    for step in LARGER:
        if step.layout.partition("=")[0] in ("fsdp", "zero2", "tp", "ddp"):
            one = replace(step, accumulate=1)
            try:
                made: Any = built(one)
                phases = [_round(made, True) for _ in range(2)]
                keep({**_told((one.layout, 0), one.mode, phases), "step": one.name, "row": in_a_row(made)})
                del made
            except (RuntimeError, ValueError) as fault:
                keep({"step": one.name, "fault": str(fault)[:300]})
            gc.collect()
            torch.cuda.empty_cache()


def keep_launches(folders: Sequence[Path], file: Path) -> None:
    """Puts what launches wrote into one file, with the number of the launch and the rank in each row."""
    found = [
        {"launch": number, "rank": int(path.stem.removeprefix("rank")), **row}
        for number, folder in enumerate(folders)
        for path in sorted(folder.glob("rank*.json"))
        for row in json.loads(path.read_text())
    ]
    file.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


def read(host: Host) -> list[dict[str, Any]]:
    return rows_in(host.file)


def rows_in(file: Path) -> list[dict[str, Any]]:
    """What `keep_launches` put into a file."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))
    return found


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    files = {host.file.name: host.file for host in HOSTS}
    parser.add_argument("--keep", choices=files)
    options = parser.parse_args()
    if options.keep:
        keep_launches(options.out, files[options.keep])
        return
    wanted = options.only.split(",") if options.only else []
    layouts = tuple(
        layout
        for layout in (*LAYOUTS, *TRAINED)
        if (layout.replace("={n}", "").partition(",")[0] in wanted if wanted else layout in LAYOUTS)
    )
    out: Path = options.out[0]
    out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with group_of(options.device):
        path = out / f"rank{dist.get_rank()}.json"

        def keep(row: dict[str, Any]) -> None:
            found.append(row)
            path.write_text(json.dumps(found))
            if dist.get_rank() == 0:
                print(row.get("step", ""), row.get("layout"), row.get("depth"), row.get("mode"), row.get("fault", "ok"))

        measure_tiny(layouts, "eager", options.device, keep)
        if options.device == "cuda" and not wanted:
            measure_larger(keep)
            measure_tiny(COMPILED, "compile", options.device, keep)


if __name__ == "__main__":
    main()
