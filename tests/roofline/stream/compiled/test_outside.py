"""What a compiled mixture of experts runs between its graphs, recorded without a GPU, beside the kernels of an H200.

`outside/qwen3-moe-l2.json.gz` is what the tracer recorded of the step whose code and kernels are `qwen3-moe-l2`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.to_rank import to_rank
from flopcast.roofline.stream.lowering.classes import group_of
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream, load, packet
from flopcast.roofline.stream.ops.to_depth import to_depth

FOLDER = Path(__file__).parents[4] / "reports" / "nvidia-h200" / "compiled-steps"
CASE = "qwen3-moe-l2"
EXPERTS = 32
# Of calls whose kernels have names of their own: the calls, and their kernels.
KERNELS = {
    ("_local_scalar_dense",): r"^Memcpy DtoH",
    ("masked_fill", "masked_fill_"): r"masked_fill_kernel",
    # histc and the gradient of the embedding fill their results too
    ("zeros", "zeros_like", "new_zeros", "ones_like", "histc", "embedding_dense_backward"): r"FillFunctor",
    ("index", "index_put_", "embedding"): r"vectorized_gather_kernel|index_elementwise_kernel",
    ("index_put",): r"indexing_backward_kernel",
    ("_to_copy", "clone"): r"bfloat16_copy_kernel|direct_copy_kernel",
    ("add",): r"CUDAFunctor(OnSelf)?_add",
    ("sort",): r"fill_reverse_indices_kernel",
    ("topk",): r"gatherTopK",
    ("histc",): r"kernelHistogram1D",
    ("cumsum",): r"DeviceScanKernel",
    ("floor_divide",): r"div_floor_kernel",
    ("ge",): r"compare_scalar_kernel",
    ("clamp_",): r"launch_clamp_scalar",
    ("embedding_dense_backward",): r"embedding_backward_feature_kernel",
}
GROUPS = {"gemm": 0.08, "attention": 0.02, "generated": 0.01, "optimizer": 0.03, "elementwise": 0.05}


@pytest.fixture(scope="module")
def kernels() -> list[tuple[str, float]]:
    record: dict[str, Any] = json.loads(gzip.decompress((FOLDER / f"{CASE}.json.gz").read_bytes()))
    return [(str(name), float(seconds)) for name, seconds in record["kernels"]["compile"]]


@pytest.fixture(scope="module")
def stream() -> Stream:
    graphs = read_output_code(gzip.decompress((FOLDER / f"{CASE}.code.gz").read_bytes()).decode())
    return to_rank(load(FOLDER / "outside" / f"{CASE}.json.gz"), graphs)


def test_calls_outside_of_the_graphs_are_those_that_ran(stream: Stream, kernels: list[tuple[str, float]]) -> None:
    calls = Counter(packet(op.name).partition(".")[2] for op in stream.ops if op.phase != "optimizer")
    for names, pattern in KERNELS.items():
        ran = sum(re.search(pattern, name) is not None for name, _ in kernels)
        assert sum(calls[name] for name in names) == ran, names
    generated = sum(name.startswith("triton_") for name, _ in kernels)
    assert sum(op.name.startswith("inductor.") for op in stream.ops) == generated
    products = sum(("f32f32_f32f32" in name and "split_k" not in name) or "gemmSN" in name for name, _ in kernels)
    products += sum("sgemm" in name for name, _ in kernels) - 1  # of the rotary table, in a graph
    assert EXPERTS * calls["_grouped_mm"] == pytest.approx(products, rel=0.02)  # one expert had no tokens


def test_layers_are_alike_and_any_depth_follows(stream: Stream) -> None:
    layers = [[op.name for op in stream.ops if op.layer == layer and op.phase != "optimizer"] for layer in (0, 1)]
    assert layers[0] == layers[1]
    assert Counter(layers[0])["aten._grouped_mm.default"] == 6
    assert to_depth(stream, 2) is stream


def test_device_time_is_that_of_the_step(stream: Stream, kernels: list[tuple[str, float]]) -> None:
    run = Run(batch=4, seq=512, optimizer="adamw-fused", mode="compile")
    step = PricedStep(stream, run, find_profile("nvidia-h200"))
    measured = sum(seconds for _, seconds in kernels)
    assert step.forecast().device_seconds == pytest.approx(measured, rel=0.05)
    forecast, found = Counter[str](), Counter[str]()
    for op in step.ops:
        if op.work is not None:
            forecast[group_of(op.work.op_class)] += op.seconds
    for name, seconds in kernels:
        found[_group(name)] += seconds
    for group, most in GROUPS.items():
        assert forecast[group] == pytest.approx(found[group], rel=most), group


def _group(kernel: str) -> str:
    for group, pattern in (
        ("generated", r"^triton_"), ("optimizer", r"multi_tensor_apply"), ("attention", r"cudnn"),
        ("gemm", r"nvjet|gemm|split_?[kK]"), ("reduction", r"reduce_kernel"),
    ):  # fmt: skip
        if re.search(pattern, kernel):
            return group
    return "elementwise"
