"""Measures what entering small compiled graphs costs the host: those of models whose layers break.

    python -m studies.calls.breaks OUT.json --mode compile      measures, on a GPU, in a process of its own
    python -m studies.calls.breaks                              what the committed processes say

Stacks of two depths whose layers are one graph together, or break into two or four pieces each, of one linear layer a
piece or of three; tiny Qwen3s, whose graph is whole and calibrates a host; tiny mixtures of experts, which break by
themselves. They take turns, on an idle device, under autocast in bf16. OUT.json gets by model and depth the seconds of
each phase and round, and what its graphs launch (of "compile-graphs", whose replays do not tell, as of "compile").

A launch costs what a layer of a stack without a break takes, over its launches. A further graph costs what a layer of a
broken stack takes beyond its launches, over its graphs: `graph_launches.FURTHER_GRAPH`. An operator of experts costs
what a layer of experts takes beyond its launches, graphs and calls: `device_work.GROUP_BY_GROUP`. Seconds are divided
by how much longer the process's Qwen3 took than the shipped host's costs say, so that they are the shipped host's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from flopcast.microbench.recipe.compiling import FIRST_STEPS, compile_model, graphs_run, phase_counts
from flopcast.microbench.recipe.settings import TORCH_MODES, Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.roofline.gpu.fit.host_calibration import beyond_launches
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts, default_host
from flopcast.roofline.gpu.profile.host_graphs import MODES
from flopcast.roofline.step.device_work import GROUP_BY_GROUP, device_work
from flopcast.roofline.step.graph_launches import FURTHER_GRAPH
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config, load_config, make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from studies.calls.turns import PHASES, Forward, in_turns
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "compiled-validation" / "broken"
RUNS = {"compile": ("1", "2", "3", "4"), "compile-graphs": ("1", "2")}  # of each mode, on as many H200s
WIDTH, ROWS = 64, 64
PIECES, LINEARS = (1, 2, 4), (1, 3)
DEPTHS = (4, 12)
DEPTHS_OF_MODELS = (2, 6)
BATCH, SEQ = 2, 64


def piece(linears: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(linears)))


class Whole(nn.Module):
    """Layers without a break: torch.compile makes one graph of all."""

    def __init__(self, depth: int, linears: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(piece(4 * linears) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class InTwo(nn.Module):
    """A layer that breaks once."""

    def __init__(self, linears: int) -> None:
        super().__init__()
        self.a, self.b = piece(2 * linears), piece(2 * linears)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        torch._dynamo.graph_break()
        z: Tensor = self.b(y)
        return x + z


class InFour(nn.Module):
    """A layer that breaks three times."""

    def __init__(self, linears: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (piece(linears) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        torch._dynamo.graph_break()
        y = self.b(y)
        torch._dynamo.graph_break()
        y = self.c(y)
        torch._dynamo.graph_break()
        z: Tensor = self.d(y)
        return x + z


class Broken(nn.Module):
    """Layers that break, in a loop that dynamo leaves to Python, for good: it must not have the code of `Whole`'s."""

    def __init__(self, depth: int, layer: Callable[[int], nn.Module], linears: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(linears) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(pieces: int, depth: int, linears: int) -> nn.Module:
    if pieces == 1:
        return Whole(depth, linears)
    return Broken(depth, {2: InTwo, 4: InFour}[pieces], linears)


def compiled_stack(pieces: int, depth: int, linears: int, mode: str, device: torch.device) -> Forward:
    model = stack(pieces, depth, linears).to(device)
    runs: Any = torch.compile(model, mode=TORCH_MODES[mode])
    rows = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)

    def forward() -> Tensor:
        model.zero_grad(set_to_none=True)
        rows.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            found: Tensor = runs(rows)
        return found.float().sum()

    return forward


def experts(number: int) -> Config:
    tiny = {
        "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "num_experts": number, "num_experts_per_tok": 2, "vocab_size": 1024,
    }  # fmt: skip
    return load_config("qwen3-moe") | tiny


MODELS = {"qwen3": make_config(width=256, depth=2, vocab=1024), "experts-8": experts(8), "experts-32": experts(32)}


def compiled_model(config: Config, depth: int, mode: str, device: torch.device) -> Forward:
    step = build(with_depth(config, depth), device, Recipe(batch=BATCH, seq=SEQ))
    compile_model(step, mode)

    def forward() -> Tensor:
        step.zero_grad()
        loss: Tensor = step.forward()
        return loss

    return forward


def builders(mode: str, device: torch.device) -> dict[str, dict[int, Callable[[], Forward]]]:
    """Functions that make each model, by its name and depth."""
    found: dict[str, dict[int, Callable[[], Forward]]] = {}
    for pieces in PIECES:
        for linears in LINEARS:
            found[f"in {pieces}/{linears} linears"] = {
                depth: partial(compiled_stack, pieces, depth, linears, mode, device) for depth in DEPTHS
            }
    for name, config in MODELS.items():
        found[name] = {depth: partial(compiled_model, config, depth, mode, device) for depth in DEPTHS_OF_MODELS}
    return found


def measured(mode: str, device: torch.device) -> dict[str, Any]:
    made: dict[str, dict[int, Forward]] = {}
    counts: dict[str, dict[int, Any]] = {}
    for name, own in builders(mode, device).items():
        made[name], counts[name] = {}, {}
        for depth, make in own.items():
            forward = make()
            with graphs_run() as codes:
                forward().backward()
            counts[name][depth] = phase_counts(codes)
            for _ in range(FIRST_STEPS - 1):
                forward().backward()
            made[name][depth] = forward
            print(f"{name}, depth {depth}: {counts[name][depth]}", flush=True)
    return {
        name: {
            depth: {phase: {"seconds": seconds[phase], **counts[name][depth][phase]} for phase in PHASES}
            for depth, seconds in by_depth.items()
        }
        for name, by_depth in in_turns(made, device).items()
    }


def kept(mode: str, run: str) -> dict[str, Any]:
    """The committed process of a mode, of one of RUNS, with the launches of "compile"."""
    found: dict[str, Any] = json.loads((FOLDER / run / f"{mode}.json").read_text())
    known: dict[str, Any] = json.loads((FOLDER / run / "compile.json").read_text())
    for name, by_depth in found.items():
        for depth, phases in by_depth.items():
            for phase, told in phases.items():
                told["launch"] = known[name][depth][phase]["launch"]
    return found


def a_layer(found: dict[str, Any], name: str, phase: str) -> tuple[float, float, float]:
    """(seconds, launches, graphs) that a layer adds."""
    (low, few), (high, many) = sorted((int(depth), phases[phase]) for depth, phases in found[name].items())
    times = [median(told["seconds"]) for told in (few, many)]
    more = (times[1] - times[0], many["launch"] - few["launch"], many["graph"] - few["graph"])
    seconds, launches, graphs = (value / (high - low) for value in more)
    return seconds, launches, graphs


def pace(found: dict[str, Any], mode: str) -> float:
    """How much longer the process's whole Qwen3s took than the shipped host's costs make of them."""
    costs = default_host().graph_costs(mode)
    measured = forecast = 0.0
    for depth, phases in found["qwen3"].items():
        for phase, told in phases.items():
            measured += median(told["seconds"])
            beyond = beyond_of_qwen3(int(depth), phase) if mode == "compile" else 0.0
            forecast += costs.launch * (told["launch"] + beyond) + costs.entry(phase)
    return measured / forecast


@cache
def beyond_of_qwen3(depth: int, phase: str) -> float:
    """What the graph of a tiny Qwen3 costs beyond its launches, in launches."""
    run = Run(batch=BATCH, seq=SEQ)
    return beyond_launches(get_stream(with_depth(MODELS["qwen3"], depth), run.traced_on("cuda")), phase)


def launch_seconds(found: dict[str, Any], phase: str) -> float:
    layers = [a_layer(found, f"in 1/{linears} linears", phase) for linears in LINEARS]
    return sum(seconds for seconds, _, _ in layers) / sum(launches for _, launches, _ in layers)


def further_graph(mode: str, phase: str, run: str) -> float:
    """What entering a further graph of a phase costs, over its first as the shipped host has it: the mean of stacks."""
    found = kept(mode, run)
    launch = launch_seconds(found, phase)
    each = []
    for pieces in PIECES[1:]:
        for linears in LINEARS:
            seconds, launches, graphs = a_layer(found, f"in {pieces}/{linears} linears", phase)
            each.append((seconds - launch * launches) / graphs)
    return fmean(each) / pace(found, mode) / default_host().graph_costs(mode).entry(phase)


def group_by_group(mode: str, phase: str, run: str) -> float:
    """Calls that an operator of experts costs beyond those that it makes, of the phase's own cost: the mean of both
    numbers of experts. In the backward for each of its two products."""
    host, found = default_host(), kept(mode, run)
    costs, launch = host.graph_costs(mode), launch_seconds(found, phase)
    beyond = []
    for name in ("experts-8", "experts-32"):
        seconds, launches, graphs = a_layer(found, name, phase)
        entering = FURTHER_GRAPH[mode][PHASES.index(phase)] * costs.entry(phase) * graphs
        between = eager_seconds(MODELS[name], mode, phase, host)
        beyond.append((seconds - launch * launches) / pace(found, mode) - entering - between)
    operators = 2 if phase == "forward" else 4
    call: float = getattr(host, phase)["launch"]
    return fmean(beyond) / operators / call


def eager_seconds(config: Config, mode: str, phase: str, host: HostCosts) -> float:
    """Host seconds of a layer's calls outside of graphs, each as one call."""
    profile = find_profile("nvidia-h200")
    run = Run(batch=BATCH, seq=SEQ, mode=mode)
    sums: list[float] = []
    for depth in DEPTHS_OF_MODELS:
        stream = get_stream(with_depth(config, depth), run.traced_on(run.device_of(profile.device)))
        inside = {i for _, first, last in stream.meta["graphs"] for i in range(first, last + 1)}
        timed = device_work(stream, run, profile, host)
        own = [i for i, op in enumerate(stream.ops) if op.phase == phase and i not in inside]
        grouped = sum(stream.ops[i].name == "aten._grouped_mm.default" for i in own)
        charged = GROUP_BY_GROUP[PHASES.index(phase)] * getattr(host, phase)["launch"] * grouped
        sums.append(sum(timed[i].host_seconds for i in own) - charged)
    low, high = DEPTHS_OF_MODELS
    return (sums[1] - sums[0]) / (high - low)


def tell() -> None:
    for mode in MODES:
        for phase in PHASES:
            shares = [further_graph(mode, phase, run) for run in RUNS[mode]]
            calls = [group_by_group(mode, phase, run) for run in RUNS[mode]]
            print(f"{mode}, {phase}: a further graph costs {fmean(shares):.2f} of the first ({_each(shares, '.2f')})")
            print(f"  an operator of experts {fmean(calls):.0f} calls beyond its own ({_each(calls, '.0f')})")


def _each(values: list[float], form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--mode", default="compile", choices=MODES)
    given = parser.parse_args()
    if given.out is None:
        tell()
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.write_text(json.dumps(measured(given.mode, device)))


if __name__ == "__main__":
    main()
