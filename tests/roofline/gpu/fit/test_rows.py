"""Measurements made from a known physics law plus noise: the fit must find the law, and know how well it
knows it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import Attention, Call, Gemm, Operand, Shape, shape_to_json
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.device import attention_alias, device_peaks, gpu_name
from flopcast.roofline.gpu.fit.cases import case_of
from flopcast.roofline.gpu.fit.memory_priors import widened_bytes
from flopcast.roofline.gpu.fit.quality import FitReport
from flopcast.roofline.gpu.fit.rows import fit, fit_rows
from flopcast.roofline.gpu.library.profiles import known_profiles
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from studies.suites.beside import product_of_4_bits

FLOOR, BANDWIDTH, PEAK, SM_COUNT = 2e-6, 4.0e12, 990e12, 132
LAUNCH = 6e-6
MACHINE: dict[str, Any] = {
    "schema": 1,
    "machine": "feedbeef0123",
    "device": {
        "type": "cuda", "name": "NVIDIA H200", "uuid": "GPU-0", "sm_count": SM_COUNT, "clock_mhz": 1980.0,
        "memory_bytes": 150_000_000_000, "l2_bytes": 62_914_560, "capability": [9, 0],
    },
    "host": {"cpu": "a processor", "cores": 8},
    "stack": {"torch": "2.11.0+cu130", "cudnn": 91900},
}  # fmt: skip


def law(shape: Shape, cache: str) -> float:
    """Seconds, by physics written down apart from the code under test."""
    if isinstance(shape, Gemm):
        busy = float("inf")
        for rows, columns, reached in ((128, 256, 0.75), (128, 128, 0.72), (64, 128, 0.6), (64, 64, 0.5)):
            blocks = np.ceil(shape.m / rows) * np.ceil(shape.n / columns) * shape.batch
            block = 1e-6 + shape.k * rows * columns * 2 / (reached * PEAK / SM_COUNT)
            busy = min(busy, np.ceil(blocks / SM_COUNT) * block)
        return float(FLOOR + max(busy, shape.bytes / BANDWIDTH))
    if isinstance(shape, Attention):
        rate = (0.45 if shape.direction == "fwd" else 0.35) * PEAK / (1 + 300 / shape.seq)
        return FLOOR + shape.flops / rate
    factor = {"aten.mul.Tensor": 1.0, "aten._to_copy.default": 0.5, "aten.add.Tensor": 1.05}.get(shape.op, 1.0)
    bandwidth = BANDWIDTH * factor * (1.6 if cache == "hot" else 1.0)
    return FLOOR + describe(shape).bytes / bandwidth


def pointwise(op: str, numel: int, width: int = 1024) -> Call:
    rows = max(1, numel // width)
    operand = Operand((rows, width), (width, 1), "fp32")
    if op == "aten._to_copy.default":
        half = Operand((rows, width), (width, 1), "bf16")
        return Call(op, (operand,), (half,), '[{"t":0}]', '{"dtype":{"d":"bf16"}}')
    return Call(op, (operand, operand), (operand,), '[{"t":0},{"t":1}]')


def row(
    shape: Shape, rng: np.random.Generator, noise: float, *, role: str = "fit", cache: str = "cold", **fields: Any
) -> dict[str, Any]:
    seconds = law(shape, cache) * float(np.exp(rng.normal(0, noise)))
    samples = (seconds * np.exp(rng.normal(0, 0.01, 20))).tolist()
    backend = "sdpa-cudnn" if isinstance(shape, Attention) else "torch"
    return {
        "schema": 1, "key": shape.key, "backend": backend, "cache": cache, "shape": shape_to_json(shape),
        "suite": "quick", "role": role, "status": "ok", "reason": None, "throttled": False, "seconds":
        seconds + 1e-6, "kernel_seconds": seconds, "kernels": [["k", seconds]], "samples": samples, "n":
        20, "timer": "graph", "method": 1, "machine": MACHINE["machine"], "time": "2026-11-01T00:00:00Z",
        **fields,
    }  # fmt: skip


def scalar(name: str, value: float, unit: str = "seconds") -> dict[str, Any]:
    return {
        "schema": 1, "key": f"scalar/{name}", "shape": None, "status": "ok", "value": value, "unit": unit,
        "samples": [value * f for f in (0.98, 0.99, 1.0, 1.01, 1.02)], "n": 5, "method": 1,
        "machine": MACHINE["machine"], "time": "2026-11-01T00:00:00Z",
    }  # fmt: skip


def host_rows() -> list[dict[str, Any]]:
    """Phases that cost 300 us + 10 us an op forward, views at 0.4 of that; an optimizer of 2 us a tensor."""
    rows = []
    for depth in (2, 6, 12):
        counts = {
            "forward": {"launch": 40 * depth + 30, "view": 25 * depth + 10},
            "backward": {"launch": 60 * depth + 20, "view": 30 * depth},
            "optimizer": {"launch": 4.0, "tensors": 11 * depth + 2},
        }
        for phase, own in counts.items():
            if phase == "optimizer":
                seconds = 100e-6 + LAUNCH * own["launch"] + 2e-6 * own["tensors"]
            else:
                seconds = 300e-6 + 10e-6 * (own["launch"] + 0.4 * own["view"])
            common = scalar("x", seconds)
            rows.append({**common, "key": f"host/qwen3/depth{depth}/{phase}", "counts": own})
        rows.append({**scalar("x", 50e-6), "key": f"host/qwen3/depth{depth}/zero_grad"})
    return rows


def measurements(noise: float, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = [
        scalar("kernel_floor", FLOOR * 1.2), scalar("kernel_floor_cupti", FLOOR), scalar("launch", LAUNCH),
        scalar("launch_queue", 1024.0, "launches"), scalar("hbm_copy", BANDWIDTH, "bytes_per_second"),
        scalar("l2_copy", 2 * BANDWIDTH, "bytes_per_second"),
        scalar("matrix_burst/bf16", 0.75 * PEAK, "flops_per_second"), *host_rows(),
    ]  # fmt: skip
    for role, count in (("fit", 60), ("holdout", 40)):
        for _ in range(count):
            m, n, k = (int(64 * 2 ** rng.uniform(1, 7)) // 64 * 64 for _ in range(3))
            rows.append(row(Gemm(m=m, n=n, k=k), rng, noise, role=role))
    for op in ("aten.mul.Tensor", "aten.add.Tensor", "aten._to_copy.default"):
        for cache in ("cold", "hot"):
            for power in range(12, 28, 2):
                rows.append(row(pointwise(op, 1 << power), rng, noise, cache=cache))
                rows.append(row(pointwise(op, 3 << (power - 1)), rng, noise, cache=cache, role="holdout"))
    for direction in ("fwd", "bwd"):
        for i, (batch, seq) in enumerate((b, s) for b in (1, 2, 4, 8) for s in (256, 512, 1024, 2048, 4096, 8192)):
            shape = Attention(batch=batch, heads=16, kv_heads=8, seq=seq, head_dim=128, direction=direction)
            rows.append(row(shape, rng, noise, role="holdout" if i % 4 == 3 else "fit"))
    return rows


@pytest.fixture(scope="module")
def fitted() -> tuple[Profile, FitReport]:
    return fit_rows(measurements(noise=0.01), MACHINE)


def test_held_out_errors_are_near_the_noise(fitted: tuple[Profile, FitReport]) -> None:
    _, report = fitted
    errors = {quality.name: quality for quality in report.classes}
    # noise of 1% alone gives a median of 0.7% and a p90 of 1.6%
    assert errors["torch/pointwise/cold"].holdout_median < 0.02  # type: ignore[operator]
    assert errors["torch/copy/hot"].holdout_median < 0.02  # type: ignore[operator]
    assert errors["torch/gemm/cold"].holdout_median < 0.05  # type: ignore[operator]
    assert errors["sdpa-cudnn/attention/cold"].holdout_median < 0.04  # type: ignore[operator]
    assert errors["torch/gemm/cold"].n == 60
    assert errors["torch/gemm/cold"].n_holdout == 40


def test_intervals_hold_what_they_promise(fitted: tuple[Profile, FitReport]) -> None:
    _, report = fitted
    covered = sum(q.holdout_coverage * q.n_holdout for q in report.classes if q.holdout_coverage is not None)
    assert 0.80 <= covered / report.n_holdout <= 1.0


def test_the_law_is_recovered(fitted: tuple[Profile, FitReport]) -> None:
    profile, _ = fitted
    cast = next(s for key, s in profile.surfaces.items() if (key.op_class, key.cache) == ("copy", "cold"))
    assert cast.params["bandwidth"] == pytest.approx(BANDWIDTH / 2, rel=0.05)
    assert cast.params["floor"] == pytest.approx(FLOOR, rel=0.1)


def test_a_measured_shape_comes_back_as_measured(fitted: tuple[Profile, FitReport]) -> None:
    profile, _ = fitted
    rows = [r for r in measurements(noise=0.01) if r.get("role") == "fit" and r["key"].startswith("gemm")]
    shapes = [Gemm(**{k: v for k, v in r["shape"].items() if k != "kind"}) for r in rows]
    found = profile.estimate([(describe(shape), "torch", "cold") for shape in shapes])
    for r, estimate in zip(rows, found, strict=True):
        assert estimate.basis == "measured"
        assert estimate.seconds == pytest.approx(r["kernel_seconds"], rel=0.02)
        assert estimate.sigma < 0.02


def test_identity_peaks_and_ceilings(fitted: tuple[Profile, FitReport]) -> None:
    profile, report = fitted
    assert profile.gpu == "nvidia-h200"
    assert profile.basis == "measured"
    assert profile.peaks["bf16"].value == pytest.approx(989.4e12)
    assert profile.peaks["bf16"].basis == "published"
    assert profile.ceilings["queue_depth"].value == 1024
    assert profile.ceilings["graph_gap"].value == pytest.approx(1e-6)
    low, high = profile.ceilings["hbm_copy"].low, profile.ceilings["hbm_copy"].high
    assert 0.9 * BANDWIDTH < low < BANDWIDTH < high < 1.1 * BANDWIDTH
    assert profile.default_attention == "sdpa-cudnn"
    assert profile.provenance["machine"] == MACHINE["machine"]
    assert profile.provenance["rows"] == report.n


def test_host_costs_are_recovered(fitted: tuple[Profile, FitReport]) -> None:
    host = fitted[0].host
    assert host is not None
    assert host.basis == "measured"
    assert host.forward["launch"] == pytest.approx(10e-6, rel=1e-6)
    assert host.forward["fixed"] == pytest.approx(300e-6, rel=1e-6)
    assert host.optimizer["per_tensor"] == pytest.approx(2e-6, rel=1e-6)
    assert host.optimizer["fixed"] == pytest.approx(150e-6)  # with zero_grad's 50 us, which walks over the same tensors
    assert host.seconds("forward", "view") == pytest.approx(4e-6)
    assert host.seconds("optimizer", "launch", launches=2, tensors=100) == pytest.approx(212e-6)


def test_host_costs_without_counts_come_from_the_launch_and_say_so() -> None:
    rows = [{**r, "counts": None} for r in measurements(noise=0.01)]
    profile, report = fit_rows(rows, MACHINE)
    assert profile.host is not None
    assert profile.host.basis == "extrapolated"
    assert any("no counts" in warning for warning in report.warnings)


def test_throttled_rows_are_used_and_counted_failed_ones_left_out() -> None:
    rows = measurements(noise=0.01)
    shaped = [r for r in rows if r["key"].startswith("call")]
    rng = np.random.default_rng(1)
    extra = row(pointwise("aten.mul.Tensor", 1 << 29), rng, 0.0, throttled=True)
    failed = {**row(pointwise("aten.mul.Tensor", 1 << 30), rng, 0.0), "status": "oom", "kernel_seconds": None}
    profile, report = fit_rows([*shaped, extra, failed], MACHINE)
    assert report.n_throttled == 1
    assert report.unused == {"oom": 1}
    assert sum(len(s.seconds) for s in profile.surfaces.values()) == report.n


def test_report_is_plain_data(fitted: tuple[Profile, FitReport]) -> None:
    _, report = fitted
    assert json.loads(json.dumps(report.to_json()))["n"] == report.n
    worst = report.classes[0].worst
    assert worst
    assert abs(worst[0][1]) >= abs(worst[-1][1])


def test_a_folder_is_read_as_it_lies(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    lines = [json.dumps(r) for r in measurements(noise=0.01) if not r["key"].startswith("gemm")]
    (tmp_path / "measurements.jsonl").write_text("\n".join(lines) + '\n{"schema":1,"key":"to')
    profile, report = fit(tmp_path)
    assert profile.surfaces
    assert any("torn" in warning for warning in report.warnings)


def test_a_folder_without_usable_rows_is_refused() -> None:
    with pytest.raises(DataError, match="flopcast bench"):
        fit_rows([scalar("launch", LAUNCH)], MACHINE)


def test_a_single_point_a_surface_is_enough() -> None:
    rng = np.random.default_rng(3)
    shapes: list[Shape] = [Gemm(m=512, n=512, k=512), pointwise("aten.mul.Tensor", 1 << 20)]
    profile, report = fit_rows([row(shape, rng, 0.0) for shape in shapes], MACHINE)
    for shape in shapes:
        found = profile.estimate([(describe(shape), "torch", "cold")])[0]
        assert found.seconds == pytest.approx(law(shape, "cold"), rel=0.02)
    assert all(quality.left_out_median is None for quality in report.surfaces)


def test_gpu_names() -> None:
    assert gpu_name({"type": "cpu", "name": "EPYC"}) == "cpu"
    assert gpu_name({"type": "cuda", "name": "NVIDIA A100-SXM4-80GB"}) == "nvidia-a100-80gb-sxm"
    assert gpu_name({"type": "cuda", "name": "NVIDIA Quantum 9000 (rev. B)"}) == "nvidia-quantum-9000-rev-b"


def test_peaks_of_an_unknown_gpu_come_from_the_live_device() -> None:
    device = {"type": "cuda", "name": "NVIDIA GeForce X", "sm_count": 100, "clock_mhz": 2000.0, "capability": [8, 9]}
    peaks = device_peaks(device, {})
    assert peaks["bf16"].value == pytest.approx(100 * 2e9 * 512)
    assert peaks["tf32"].value == pytest.approx(100 * 2e9 * 256)
    assert peaks["fp32"].value == pytest.approx(100 * 2e9 * 256)
    assert peaks["fp8"].value == pytest.approx(100 * 2e9 * 1024)
    assert peaks["bf16"].basis == "datasheet"


def test_the_peak_of_a_processor_is_its_burst() -> None:
    burst = Number(1e11, 0.9e11, 1.1e11, "measured", "scalar/matrix_burst/fp32")
    assert device_peaks({"type": "cpu", "name": "EPYC"}, {"matrix_burst/fp32": burst}) == {"fp32": burst}


@pytest.mark.parametrize(
    ("torch", "cudnn", "capability", "expected"),
    [
        ("2.11.0", 91900, [9, 0], "sdpa-cudnn"),
        ("2.9.1", 91900, [9, 0], "sdpa-flash"),
        ("2.11.0", 90100, [9, 0], "sdpa-flash"),
        ("2.11.0", 91900, [8, 0], "sdpa-flash"),
    ],
)
def test_attention_that_torch_picks(torch: str, cudnn: int, capability: list[int], expected: str) -> None:
    device = {"type": "cuda", "capability": capability}
    chosen = attention_alias(device, {"torch": torch, "cudnn": cudnn}, {"torch", "sdpa-flash", "sdpa-cudnn"})
    assert chosen == {"sdpa": expected}


def test_a_wall_clock_that_stalled_moves_nothing() -> None:
    rng = np.random.default_rng(5)
    shapes = [pointwise("aten.mul.Tensor", 1 << power) for power in range(12, 27)]
    rows = [{**row(shape, rng, 0.02), "timer": "wall"} for shape in shapes]
    rows[6]["seconds"] = rows[6]["kernel_seconds"] = 8e-3  # a processor has one reading
    rows[6]["samples"] = [8e-3] * 20
    profile, report = fit_rows(rows, MACHINE)
    assert any("no weight" in warning for warning in report.warnings)
    for i in (5, 6, 7):
        found = profile.estimate([(describe(shapes[i]), "torch", "cold")])[0]
        assert found.seconds == pytest.approx(law(shapes[i], "cold"), rel=0.15)


@pytest.mark.parametrize(
    ("op", "changes", "expected"),
    [
        ("aten.mul.Tensor", {"cache": "cold", "sets": 3}, 9e-6),  # back to back, as in a step
        ("aten.mul.Tensor", {"cache": "hot"}, 9e-6),
        ("aten.mul.Tensor", {"cache": "cold", "sets": 256}, 10e-6),  # so small that rotating leaves them in L2
        ("aten.embedding.default", {"cache": "cold", "sets": 3}, 10e-6),  # few rows of a large table
        ("aten.mul.Tensor", {"cache": "cold", "sets": 3, "seconds": 11e-6}, 10e-6),  # the least
    ],
)
def test_which_of_two_readings_counts(op: str, changes: dict[str, Any], expected: float) -> None:
    measured = row(pointwise(op, 1 << 20), np.random.default_rng(0), 0.0)
    measured |= {"seconds": 9e-6, "kernel_seconds": 10e-6, "samples": [9e-6] * 10, "timer": "graph", **changes}
    profile, _ = fit_rows([measured], MACHINE)
    (surface,) = profile.surfaces.values()
    assert surface.seconds == pytest.approx((expected,))


@pytest.mark.parametrize(
    ("op", "inputs", "output", "expected"),
    [
        ("aten.add.Tensor", ("fp32", "bf16"), "fp32", 10.0),
        ("aten.mul.Tensor", ("bf16", "bf16"), "bf16", 0.0),
        ("aten._to_copy.default", ("bf16",), "fp32", 6.0),
        ("aten._to_copy.default", ("fp32",), "bf16", 0.0),
        ("aten._to_copy.default", ("int64",), "fp32", 0.0),
    ],
)
def test_which_kernels_widen_what_they_read(op: str, inputs: tuple[str, ...], output: str, expected: float) -> None:
    operands = [Operand((512, 64), (64, 1), dtype) for dtype in (*inputs, output)]
    call = Call(op, tuple(operands[:-1]), (operands[-1],), json.dumps([{"t": i} for i in range(len(inputs))]))
    assert widened_bytes(describe(call)) == expected


def test_a_round_more_of_a_widening_cast_costs_a_round() -> None:
    """The H200's: a million elements fill it once."""
    profile = Profile.load(known_profiles()["nvidia-h200"])

    def seconds(elements: int) -> float:
        shape = (elements // 1024, 1024)
        operands = [Operand(shape, (1024, 1), dtype) for dtype in ("fp32", "bf16", "fp32")]
        call = Call("aten.add.Tensor", tuple(operands[:2]), (operands[2],), '[{"t":0},{"t":1}]')
        return profile.estimate([(describe(call), "torch", "cold")])[0].seconds

    one, more, two = (seconds(n << 10) for n in (1024, 1280, 1536))
    assert more / one > 1.25
    assert two / more < 1.15


def test_a_loss_of_more_rows_may_take_less_and_sums_over_groups_follow_their_size() -> None:
    """nll_loss_forward: one block, whose threads wait in turns (20 at 640 rows, 12 at 768), as an H200 measures it
    cold. Sums over groups of two, all that was measured, tell those over seven."""

    def loss(rows: int) -> Call:
        return Call(
            "aten.nll_loss_forward.default",
            (Operand((rows, 50000), (50000, 1), "fp32"), Operand((rows,), (1,), "int64")),
            (Operand((), (), "fp32"), Operand((), (), "fp32")),
            '[{"t":0},{"t":1},null,1,-100]',
        )

    def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))

    def sums(batch: int, group: int) -> Call:
        shape, left = (batch, 1, group, 256, 128), (batch, 1, 256, 128)
        return Call(
            "aten.sum.dim_IntList",
            (Operand(shape, contiguous(shape), "fp32"),),
            (Operand(left, contiguous(left), "fp32"),),
            '[{"t":0},[2]]',
        )

    turns = {32: 1, 64: 2, 128: 4, 256: 8, 384: 12, 512: 16, 1024: 16, 2048: 16}
    seconds = {loss(rows): 1.2e-6 + 1.04e-6 * count for rows, count in turns.items()}
    seconds |= {(call := sums(batch, 2)): FLOOR + 3 * call.bytes / BANDWIDTH for batch in (2, 4, 8, 16, 32, 64)}
    rng = np.random.default_rng(0)
    rows = [row(call, rng, 0.0, kernel_seconds=time, seconds=time + 1e-6, samples=[]) for call, time in seconds.items()]
    profile, _ = fit_rows(rows, MACHINE)
    asked = [loss(640), loss(768), sums(20, 7)]
    found = [estimate.seconds for estimate in profile.estimate([(describe(call), "torch", "cold") for call in asked])]
    assert found[0] == pytest.approx(1.2e-6 + 20 * 1.04e-6, rel=0.1)
    assert found[1] == pytest.approx(1.2e-6 + 12 * 1.04e-6, rel=0.1)
    assert found[2] == pytest.approx(FLOOR + 3 * asked[2].bytes / BANDWIDTH, rel=0.2)


def test_few_points_do_not_narrow_what_their_class_has_shown() -> None:
    """Nine products in fp32 that lie on the law say nothing of how far cuBLAS jumps between sizes; sixty in bf16 do."""
    rng = np.random.default_rng(7)
    jumping = [
        row(Gemm(m=m, n=n, k=k), rng, 0.08) for m, n, k in (64 * 2 ** rng.integers(0, 7, (60, 3)) * 3 // 2).tolist()
    ]
    round_ = [row(Gemm(m=m, n=n, k=512, dtype="fp32"), rng, 0.0) for m in (512, 1024, 2048) for n in (512, 1024, 2048)]
    profile, _ = fit_rows([scalar("kernel_floor_cupti", FLOOR), *jumping, *round_], MACHINE)
    found = {key.variant.dtypes: surface.residual for key, surface in profile.surfaces.items()}
    assert found["fp32"].amplitude >= 0.99 * found["bf16"].amplitude
    assert found["fp32"].white >= 0.99 * found["bf16"].white
    assert found["fp32"].sigma_scale >= found["bf16"].sigma_scale


def test_rows_that_a_kernel_holds_in_two_tiles_are_less_certain() -> None:
    """No row of 1,280 was fitted, nor any other that the norms of Triton take by their code for two tiles."""
    rng = np.random.default_rng(8)

    def norm(rows: int, width: int) -> Call:
        x, weight = Operand((rows, width), (width, 1), "fp32"), Operand((width,), (1,), "fp32")
        out, rstd = Operand((rows, width), (width, 1), "bf16"), Operand((rows,), (1,), "fp32")
        return Call("flopcast.rms_norm.default", (x, weight), (out, rstd), '[{"t":0},{"t":1},1e-06,{"d":"bf16"}]')

    shapes = [norm(rows, width) for rows in (1024, 4096, 16384) for width in (512, 1024, 2048, 4096)]
    profile, _ = fit_rows([{**row(shape, rng, 0.01), "backend": "triton"} for shape in shapes], MACHINE)
    whole, parted = profile.estimate([(describe(norm(4096, width)), "triton", "cold") for width in (1536 + 64, 1280)])
    assert whole.sigma < 0.08
    assert parted.sigma > 0.15
    assert parted.seconds == pytest.approx(law(norm(4096, 1280), "cold"), rel=0.05)


def test_attention_with_windows_and_documents_is_not_fitted_as_causal() -> None:
    """Its kernels are others than the surface's; as causal calls of their length they would be three times too fast."""
    rng = np.random.default_rng(0)
    shape = Attention(batch=1, heads=8, kv_heads=8, seq=2048, head_dim=128)
    banded = [replace(shape, window=256), replace(shape, documents=8)]
    causal, *others = (case_of(row(one, rng, 0.0), 0.0, []) for one in (shape, *banded))
    assert causal is not None
    assert others == [None, None]


def test_products_of_4_bits_get_a_curve_of_their_own() -> None:
    """By bytes, as few rows are bound by them; what was a least and a most becomes the law and what it leaves."""
    rng = np.random.default_rng(3)
    shapes = [product_of_4_bits(m, n, k) for m in (1, 4, 16) for n in (1024, 4096, 8192) for k in (1024, 4096)]
    scalars = [r for r in measurements(noise=0.01) if r["key"].startswith("scalar")]
    before, _ = fit_rows([*scalars, row(Gemm(m=64, n=64, k=64), rng, 0.01)], MACHINE)
    after, _ = fit_rows([*scalars, *(row(shape, rng, 0.01) for shape in shapes)], MACHINE)
    new = product_of_4_bits(8, 6144, 2048)
    (rough,), (known,) = (profile.estimate([(describe(new), "torch", "cold")]) for profile in (before, after))
    assert rough.basis == "extrapolated"
    assert known.basis == "interpolated"
    assert known.seconds == pytest.approx(law(new, "cold"), rel=0.05)
    assert known.sigma < 0.1 < rough.sigma
