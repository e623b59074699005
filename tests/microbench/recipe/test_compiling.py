"""Compiled steps as they are measured: what their graphs launch is counted from inductor's text."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from flopcast.microbench.recipe.compiling import compile_model, counts_of, forget, graphs_run, phase_counts
from flopcast.microbench.recipe.plans import mode_of
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build_module
from flopcast.roofline.stream.compiled.output_code import GRAPH_MARK, read_output_code

RECORDED = Path(__file__).resolve().parents[3] / "reports" / "nvidia-h200" / "compiled-steps"


@pytest.mark.parametrize("case", ["gpt2-l2", "qwen3-0.6b-l2", "mlp"])
def test_launches_are_counted_as_the_reader_of_the_code_does(case: str) -> None:
    """Real code of an H200: with sums of partial results, attention, copies and random numbers."""
    text = gzip.decompress((RECORDED / f"{case}.code.gz").read_bytes()).decode()
    parts = [part for part in GRAPH_MARK.split(text) if part.strip()]
    for graph, part in zip(read_output_code(text), parts, strict=True):
        assert counts_of(part) == ("backward" if graph.is_backward else "forward", len(graph.launches))
    graphs = sum(found["graph"] for found in phase_counts(parts).values())
    assert graphs == len(parts)


def linear_step() -> TrainingStep:
    """Products alone, for which inductor compiles no kernel."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
    return build_module(model, torch.zeros(4, 8), "cpu", Recipe(precision="fp32"))


def test_graphs_are_noted_while_they_run() -> None:
    step = linear_step()
    compile_model(step, "compile")
    with graphs_run() as codes:
        step.backward(step.forward())
    with graphs_run() as again:
        step.backward(step.forward())
        step.forward()
    with graphs_run() as later:
        pass
    counts = phase_counts(codes)
    assert counts["forward"] == {"launch": 2.0, "graph": 1.0}
    assert counts["backward"]["launch"] == 3.0  # two gradients of weights, one of what lies between
    assert phase_counts(again)["forward"] == {"launch": 4.0, "graph": 2.0}
    assert not later
    forget("compile")


def test_eager_steps_stay_as_they_are() -> None:
    step = linear_step()
    model = step.model
    compile_model(step, "eager")
    assert step.model is model


def test_the_key_of_a_row_says_its_mode() -> None:
    assert mode_of("host/qwen3-adamw/depth2/forward") == "eager"
    assert mode_of("host/qwen3-adamw-compile/process1/depth2/forward") == "compile"
    assert mode_of("host/qwen3-adamw-compile-graphs/depth6/steady") == "compile-graphs"
