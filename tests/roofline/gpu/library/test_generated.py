"""The shipped law of generated kernels, against the kernels of real steps that it was not fitted to."""

from __future__ import annotations

import ast
import gzip
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.generated import seconds
from flopcast.roofline.gpu.library.generated import fitted, generated_seconds, rates_of
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel, kernel_of_launch
from flopcast.roofline.stream.compiled.instructions import work_of
from flopcast.roofline.stream.compiled.kernel_source import moved_bytes, read_kernel
from flopcast.roofline.stream.compiled.output_code import GRAPH_MARK
from flopcast.roofline.stream.compiled.profiled import TimedLaunch
from studies.compiled.recorded import joined

FOLDER = Path(__file__).parents[4] / "reports" / "nvidia-h200" / "compiled-steps"
H200 = find_spec("nvidia-h200")
HELD_OUT = ("llama-3.2-1b-l2", "qwen3-1.7b-l2")


@cache
def kernels(case: str) -> tuple[TimedLaunch, ...]:
    return tuple(one for one in joined(FOLDER, case).launches if one.launch.is_generated)


def test_long_kernels_are_known_better_than_short_ones() -> None:
    """And no two of nearly one duration by much: between those of the file deviations are interpolated."""
    known = fitted()
    first, *_, last = known.spreads
    assert last.sigma < 0.5 * first.sigma
    assert known.sigma(first.seconds / 100) == first.sigma
    assert known.sigma(last.seconds * 100) == last.sigma
    for below, above in pairwise(known.spreads):
        middle = known.sigma((below.seconds * above.seconds) ** 0.5)
        assert middle == pytest.approx((below.sigma * above.sigma) ** 0.5)
        assert known.sigma(above.seconds) == pytest.approx(above.sigma)


@pytest.mark.parametrize("case", HELD_OUT)
def test_kernels_of_a_step_that_it_never_saw(case: str) -> None:
    rows = kernels(case)
    predicted = [seconds(kernel_of_launch(row.launch), rates_of(H200), fitted().law) for row in rows]
    assert sum(predicted) == pytest.approx(sum(row.seconds for row in rows), rel=0.05)
    errors = [abs(found / row.seconds - 1) for found, row in zip(predicted, rows, strict=True)]
    assert median(errors) < 0.08
    assert sorted(errors)[int(0.9 * len(errors))] < 0.25


@pytest.mark.parametrize("case", HELD_OUT)
def test_bytes_alone_do_not_explain_them(case: str) -> None:
    """The best bandwidth and the shipped floor: a tenth of the kernels are off by more than a quarter."""
    rows = kernels(case)
    floor = fitted().law.floor
    rate = median(row.launch.bytes / (row.seconds - floor) for row in rows if row.seconds > 2 * floor)
    errors = sorted(abs((floor + row.launch.bytes / rate) / row.seconds - 1) for row in rows)
    assert errors[int(0.9 * len(errors))] > 0.4


def test_other_gpus_are_projected() -> None:
    row = max(kernels(HELD_OUT[0]), key=lambda row: row.launch.bytes)
    kernel = kernel_of_launch(row.launch)
    here, near, there = (
        generated_seconds(kernel, find_profile(name))
        for name in ("nvidia-h200", "nvidia-h100-sxm", "nvidia-a100-80gb-sxm")
    )
    assert (here.basis, near.basis, there.basis) == ("interpolated", "extrapolated", "extrapolated")
    ratio = H200.bandwidth_bytes_per_second / find_spec("nvidia-a100-80gb-sxm").bandwidth_bytes_per_second
    assert there.seconds / here.seconds == pytest.approx(ratio, rel=0.3)
    assert 0 < here.sigma < near.sigma < there.sigma


def test_a_gpu_without_a_datasheet_goes_by_what_was_measured_of_it() -> None:
    kernel = kernel_of_launch(max(kernels(HELD_OUT[0]), key=lambda row: row.launch.bytes).launch)
    known = find_profile("nvidia-h200")
    unknown = replace(known, gpu="nvidia-h200-of-tomorrow")
    assert generated_seconds(kernel, unknown).seconds == pytest.approx(
        generated_seconds(kernel, known).seconds, rel=0.05
    )
    assert generated_seconds(kernel, unknown).basis == "extrapolated"


def sources(case: str) -> list[str]:
    """The generated kernels of a step's text."""
    text = gzip.decompress((FOLDER / f"{case}.code.gz").read_bytes()).decode()
    made = [node for part in GRAPH_MARK.split(text) if part.strip() for node in ast.parse(part).body]
    calls = [node.value for node in made if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return [ast.literal_eval(call.args[1]) for call in calls if ast.unparse(call.func) == "async_compile.triton"]


def test_real_kernels_take_no_less_for_more_rows() -> None:
    kernels = [read_kernel(source) for source in sources("qwen3-0.6b-l2-4x256")]
    assert len(kernels) > 40
    for kernel in kernels:
        numels = {name: 64 for name in kernel.parameters if name.endswith("numel")}
        times = []
        for rows in (1, 100, 128, 10_000, 1 << 20, 3 << 20):
            numels["xnumel"] = rows
            moved = moved_bytes(kernel, numels, dict.fromkeys(kernel.dtypes, 1 << 62)).values()
            launched = GeneratedKernel(
                kind=kernel.kind, bytes_read=sum(read for read, _ in moved),
                bytes_written=sum(written for _, written in moved),
                numels=tuple((name.removesuffix("numel"), size) for name, size in numels.items()), hint=kernel.hint,
                work=work_of(kernel, numels),
            )  # fmt: skip
            times.append(seconds(launched, rates_of(H200), fitted().law))
        assert times == sorted(times), kernel.name
