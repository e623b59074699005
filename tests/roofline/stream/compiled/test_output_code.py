"""The real texts that inductor generated on an H200 (`reports/nvidia-h200/compiled-steps`), read whole.

`recorded.json` beside this file has the launches and bytes by kind of each; this file run as a script with `--update`
writes it anew.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import DTYPE_BYTES, Operand
from flopcast.roofline.stream.compiled import output_code
from flopcast.roofline.stream.compiled.kernel_source import (
    Kernel,
    UnreadableCodeError,
    _Reader,
    moved_bytes,
    read_kernel,
)
from flopcast.roofline.stream.compiled.launches import Graph, Kind, Work, storage_bytes
from flopcast.roofline.stream.compiled.layers import alike
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.profiled import join

FOLDER = Path(__file__).parents[4] / "reports" / "nvidia-h200" / "compiled-steps"
GOLDEN = Path(__file__).with_name("recorded.json")
CASES = sorted(path.name.removesuffix(".code.gz") for path in FOLDER.glob("*.code.gz"))


def text_of(case: str) -> str:
    return gzip.decompress((FOLDER / f"{case}.code.gz").read_bytes()).decode()


@cache
def graphs_of(case: str) -> tuple[Graph, ...]:
    return read_output_code(text_of(case))


def by_kind(graphs: tuple[Graph, ...]) -> dict[str, list[int]]:
    launches = [launch for graph in graphs for launch in graph.launches]
    return {
        kind.value: [len(own), sum(launch.bytes_read for launch in own), sum(launch.bytes_written for launch in own)]
        for kind in Kind
        for own in [[launch for launch in launches if launch.kind is kind]]
        if own
    }


@pytest.mark.parametrize("case", CASES)
def test_launches_and_bytes_by_kind(case: str) -> None:
    assert by_kind(graphs_of(case)) == json.loads(GOLDEN.read_text())[case]


@pytest.mark.parametrize("mode", ["compile", "compile-graphs"])
def test_the_mlps_launches_are_the_kernels_profiled(mode: str) -> None:
    """Each generated kernel by name and in order; each product a kernel, with a fill before it or none."""
    kernels = kernels_of("mlp", mode)
    joined = join(graphs_of("mlp"), kernels)
    launches = [launch for graph in graphs_of("mlp") for launch in graph.launches]
    assert [timed.launch for timed in joined.launches] == launches
    for timed in joined.launches:
        names = [name for name, _ in timed.kernels if not name.startswith("Memset")]
        assert len(names) == 1
        assert names[0] == timed.launch.name if timed.launch.is_generated else names[0].startswith("nvjet")
    assert len(joined.optimizer) == 8 + (mode == "compile-graphs")  # and one that copies gradients to where they were
    told = [name.split("<")[0] for name, _ in joined.outside]
    copies = ["Memcpy DtoD (Device -> Device)"] * 2 if mode == "compile-graphs" else []
    assert told == [*copies, "void at::native::vectorized_elementwise_kernel"]  # the loss's own gradient, 1


def test_graphs_that_are_captured_launch_the_same() -> None:
    """Two layers of Qwen3-0.6B for mode "reduce-overhead", by torch 2.11 without a GPU: parts of the graph in functions
    of their own, which the caller hands what it has, and the rest as recorded without capture."""
    text = gzip.decompress((Path(__file__).parent / "captured.code.gz").read_bytes()).decode()
    for captured, graph in zip(read_output_code(text), graphs_of("qwen3-0.6b-l2-4x256"), strict=True):
        assert captured.captured == ((0, len(graph.launches)),)
        assert [alike(launch) for launch in captured.launches] == [alike(launch) for launch in graph.launches]
        assert Counter(b.bytes for b in captured.buffers) == Counter(b.bytes for b in graph.buffers)
        kept = [Counter(b.bytes for b in one.buffers if b.died is None) for one in (captured, graph)]
        assert kept[0] == kept[1]
        assert (captured.label, len(captured.inputs), len(captured.outputs)) == (
            graph.label, len(graph.inputs), len(graph.outputs),
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_launch_ran(case: str) -> None:
    """Generated kernels have a kernel each, library calls one or more, and no kernel is lost."""
    kernels = kernels_of(case, "compile")
    joined = join(graphs_of(case), kernels)
    counted = sum(len(timed.kernels) for timed in joined.launches) + len(joined.optimizer) + len(joined.outside)
    assert counted == len(kernels)
    assert all(timed.kernels for timed in joined.launches)
    assert all(len(timed.kernels) == 1 for timed in joined.launches if timed.launch.is_generated)
    launches = sum(len(graph.launches) for graph in graphs_of(case))
    if case == "qwen3-moe-l2":  # the experts break the graph: both layers run the same graphs, and 865 kernels eagerly
        assert (launches, len(joined.launches)) == (65, 133)
    else:
        assert len(joined.launches) == launches
        assert len(joined.outside) <= 20


def test_a_profile_of_another_step_is_told() -> None:
    with pytest.raises(DataError, match="number 1 of 51 that are generated, begins no graph of the text"):
        join(graphs_of("mlp"), kernels_of("gpt2-l2", "compile")[:100])


def kernels_of(case: str, mode: str) -> list[tuple[str, float]]:
    record = json.loads(gzip.decompress((FOLDER / f"{case}.json.gz").read_bytes()))
    return [(name, seconds) for name, seconds in record["kernels"][mode]]


def test_bytes_are_those_of_inductors_own_rule() -> None:
    """Inductor estimates a kernel's bytes as each argument's size, a slice's as often as it is read in different
    places, and twice for one updated in place (torch 2.11, `SIMDKernel.estimate_kernel_num_bytes`). It counts more
    where an argument named in place is only stored (rsqrt of a norm) or slices overlap (rotary embedding), less where
    atomic additions read."""
    errors = {}
    for case in ("qwen3-0.6b-l2", "gpt2-l2", "llama-3.2-1b-l2", "mlp", "qwen3-0.6b-l2-4x256"):
        for name, source, numels, sizes in generated_launches(case):
            kernel = read_kernel(source)
            expected = inductors_bytes(kernel, numels, sizes)
            errors[case, name] = sum(map(sum, moved_bytes(kernel, numels, sizes).values())) / expected - 1.0
    off = {name: error for (_, name), error in errors.items() if abs(error) > 0.02}
    assert statistics.median(abs(error) for error in errors.values()) < 1e-9
    assert len(errors) > 150
    assert len(off) <= 6
    for name, error in off.items():
        assert error > 0 if "embedding_dense_backward" in name else error < 0 and "sin_slice" in name


def generated_launches(case: str) -> list[tuple[str, str, dict[str, int], dict[str, int]]]:
    """(name, source, numels, sizes of what pointers point to), as the reader finds them."""
    seen: list[tuple[str, str, dict[str, int], dict[str, int]]] = []
    asked: set[Any] = set()

    def note(*kernel: Any) -> tuple[dict[str, tuple[int, int]], Work]:
        source, numels, sizes = kernel
        if kernel not in asked:
            seen.append((read_kernel(source).name, source, dict(numels), dict(sizes)))
        asked.add(kernel)
        return {}, Work()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_code, "_costs_of", note)
        for part in output_code.GRAPH_MARK.split(text_of(case))[1:]:
            read_output_code.__wrapped__(part)  # not what another test has read, nor for others to find
    return seen


def inductors_bytes(kernel: Kernel, numels: dict[str, int], sizes: dict[str, int]) -> int:
    places = {name: set() for name in kernel.pointers()}
    for access in _Reader(kernel, numels).accesses():
        places[access.pointer].add(access.index)
    launched = prod(numels.values())
    counts = {
        name: sizes[name] if sizes[name] <= launched else len(found) * launched
        for name, found in places.items()
        if found
    }
    return sum(
        count * DTYPE_BYTES[kernel.dtypes[name]] * (2 if name.startswith("in_out") else 1)
        for name, count in counts.items()
    )


def test_a_product_has_its_operands_as_they_lie() -> None:
    forward, backward = graphs_of("mlp")
    first = next(launch for launch in forward.launches if launch.kind is Kind.PRODUCT)
    assert first.name == "addmm"
    assert first.operands[1:] == (Operand((4096, 4096), (4096, 1), "bf16"), Operand((4096, 4096), (1, 4096), "bf16"))
    assert first.results == (Operand((4096, 4096), (4096, 1), "bf16"),)
    weight = [launch for launch in backward.launches if launch.kind is Kind.PRODUCT][-1]
    assert weight.operands[0] == Operand((4096, 4096), (1, 4096), "bf16")  # the gradient, transposed


def test_attention_has_its_mask_and_results() -> None:
    forward, backward = graphs_of("qwen3-0.6b-l2")
    call = next(launch for launch in forward.launches if launch.kind is Kind.ATTENTION)
    assert [operand.shape for operand in call.operands] == [(8, 16, 1024, 128)] * 3 + [(8, 1, 1024, 1024)]
    assert [(result.shape, result.dtype) for result in call.results] == [
        ((8, 16, 1024, 128), "bf16"), ((8, 16, 1024, 1), "fp32"), ((), "int64"), ((), "int64"),
    ]  # fmt: skip
    call = next(launch for launch in backward.launches if launch.kind is Kind.ATTENTION_BACKWARD)
    assert [result.shape for result in call.results] == [(8, 16, 1024, 128)] * 3


def test_buffers_live_from_their_allocation_to_their_last_name() -> None:
    """What outlives the forward pass is what the backward pass takes: saved tensors and the loss."""
    forward, backward = graphs_of("mlp")
    assert len(forward.inputs) == 20
    saved = [tensor for name, tensor in backward.inputs if not name.startswith(("primals", "tangents"))]
    kept = [buffer for buffer in forward.buffers if buffer.died is None and not buffer.is_input]
    loss = 4
    assert sum(buffer.bytes for buffer in kept) == sum(storage_bytes(tensor) for tensor in saved) + loss
    gradients = [buffer for buffer in backward.buffers if buffer.died is None and not buffer.is_input]
    assert sum(buffer.bytes for buffer in gradients) == 4 * (8 * 4096 * 4097 + 1000 * 4097)
    assert all(0 <= buffer.born <= len(graph.launches) for graph in (forward, backward) for buffer in graph.buffers)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "            buf0 = something_new(primals_3)\n",
            r"line \d+ of a graph is of no known form: 'buf0 = something_new",
        ),
        ("            for i in range(3):\n                pass\n", r"of no known form: 'for i in range"),
        ("            buf0 = empty_strided_cuda((s0, 3), (3, 1), torch.float32)\n", r"sizes \(s0, 3\) are not numbers"),
        ("            extern_kernels.mm(buf777, primals_2, out=primals_2)\n", "buf777 is not known"),
    ],
)
def test_an_unknown_line_is_an_error_that_shows_it(line: str, told: str) -> None:
    text = text_of("mlp")
    place = text.index("            torch.cuda.set_device(0)\n")
    broken = text[:place] + line + text[place:]
    with pytest.raises(UnreadableCodeError, match=told):
        read_output_code(broken)


def test_text_that_is_no_output_code_is_told() -> None:
    with pytest.raises(UnreadableCodeError, match=r"no function call\(args\)"):
        read_output_code("x = 3\n")
    with pytest.raises(UnreadableCodeError, match="line 1 is not Python"):
        read_output_code("x = = 3\n")


if __name__ == "__main__" and "--update" in sys.argv:
    GOLDEN.write_text(json.dumps({case: by_kind(graphs_of(case)) for case in CASES}, indent=1) + "\n")


def test_a_sum_of_partial_sums_is_cast_by_a_copy() -> None:
    """torch 2.13 turns the sums of sharded layers, whose parameters are bf16, into their type in the same line."""
    text = text_of("gpt2-l2")
    cast = re.sub(r"(\.view\(\d+, (\d+)\)\.sum\(dim=0\))", r"\1.view([1, \2]).to(torch.bfloat16)", text)
    kept, others = (by_kind(read_output_code(one)) for one in (text, cast))
    kind = Kind.COPY.value
    number = text.count(".sum(dim=0)")
    assert number == 10
    before = kept.get(kind, [0, 0, 0])
    count, read, written = (new - old for new, old in zip(others[kind], before, strict=True))
    assert (count, read) == (number, 2 * written)
    assert {name: value for name, value in others.items() if name != kind} == {
        name: value for name, value in kept.items() if name != kind
    }


@pytest.mark.parametrize("case", ["mlp", "llama-3.2-1b-l2"])
def test_what_a_launch_touches_adds_up_by_buffer(case: str) -> None:
    for graph in graphs_of(case):
        known = {buffer.name for buffer in graph.buffers}
        for launch in graph.launches:
            assert launch.bytes_read == sum(touch.read for touch in launch.touches)
            assert launch.bytes_written == sum(touch.written for touch in launch.touches)
            assert {touch.buffer for touch in launch.touches if touch.read + touch.written} <= known
