"""A profile answers every request, says how it came to the answer, and survives the disk."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopcast.errors import DataError, UsageError
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit.priors import Belief, attention_prior, gemm_prior, memory_prior
from flopcast.roofline.gpu.fit.surface import Points, fit_surface
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.passes import DEFAULT_FLOOR
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.stream.lowering.variants import KernelKind, SurfaceKey, Variant, parse_variant

FLOOR, PEAK, SM_COUNT = 2e-6, 300e12, 108.0


@dataclass(frozen=True)
class Piece:
    """What `estimate` is asked for."""

    op_class: str
    variant: Variant
    features: tuple[float, ...]
    bytes: int
    flops: int = 0


def moved(bytes_: int, op_class: str = "pointwise", variant: str = "mul|fp32>fp32|a>a") -> Piece:
    return Piece(op_class, parse_variant(variant), (float(np.log2(bytes_)), 10.0), bytes_)


def product(m: int, n: int, k: int, variant: str = "nt/bf16") -> Piece:
    size = 4 if "32" in variant else 2
    features = tuple(float(x) for x in np.log2([m, n, k]))
    return Piece("gemm", parse_variant(variant), features, size * (m * k + k * n + m * n), 2 * m * n * k)


def memory_surface(variant: str, bandwidth: float) -> Surface:
    bytes_ = 2.0 ** np.arange(12, 30, 2)
    features = np.column_stack([np.log2(bytes_), np.full(len(bytes_), 10.0)])
    points = Points(features, bytes_, 0 * bytes_, FLOOR + bytes_ / bandwidth, np.full(len(bytes_), 0.005))
    return fit_surface("memory", parse_variant(variant), points, memory_prior(Belief(FLOOR, 0.3), Belief(2e12, 0.5), 3))


def gemm_surface(variant: str) -> Surface:
    sizes = 2.0 ** np.array([[7, 7, 7], [9, 9, 9], [10, 10, 10], [11, 11, 11], [12, 12, 12], [13, 13, 13]])
    m, n, k = sizes.T
    seconds = FLOOR + 2 * m * n * k / (0.6 * PEAK)
    points = Points(np.log2(sizes), 2 * 3 * m * n, 2 * m * n * k, seconds, np.full(6, 0.005))
    return fit_surface("gemm", parse_variant(variant), points, gemm_prior(PEAK, SM_COUNT, FLOOR, 2e12, 40e6, 11))


def attention_surface(variant: str) -> Surface:
    seq = 2.0 ** np.arange(8, 14)
    features = np.column_stack([np.full(6, 6.0), np.full(6, 1.0), np.log2(seq)])
    flops = 256 * 64 * seq**2
    points = Points(features, 512 * 64 * seq, flops, FLOOR + flops / (0.5 * PEAK), np.full(6, 0.005))
    return fit_surface("attention", parse_variant(variant), points, attention_prior(PEAK, SM_COUNT, FLOOR, 2e12))


def keyed(surfaces: dict[str, Surface]) -> dict[SurfaceKey, Surface]:
    return {SurfaceKey.parse(name): surface for name, surface in surfaces.items()}


def exact(value: float) -> Number:
    return Number(value, value, value, "measured", "a test")


PROFILE = Profile(
    gpu="test-gpu",
    basis="measured",
    device={"type": "cuda", "name": "Test", "sm_count": 108, "l2_bytes": 40_000_000},
    peaks={"bf16": exact(PEAK), "fp16": exact(PEAK), "tf32": exact(PEAK / 2), "fp32": exact(PEAK / 16)},
    ceilings={"hbm_copy": exact(1.6e12), "kernel_floor": exact(FLOOR)},
    surfaces=keyed(
        {
            "torch/pointwise/mul|fp32>fp32|a>a/cold": memory_surface("mul|fp32>fp32|a>a", 1.5e12),
            "torch/pointwise/mul|fp32>fp32|a>a/hot": memory_surface("mul|fp32>fp32|a>a", 3.0e12),
            "torch/pointwise/add|bf16>bf16|a>a/cold": memory_surface("add|bf16>bf16|a>a", 1.2e12),
            "torch/gemm/nt/bf16/cold": gemm_surface("nt/bf16"),
            "sdpa-flash/attention/fwd/causal/bf16/d128/cold": attention_surface("fwd/causal/bf16/d128"),
        }
    ),
    launch_counts={
        KernelKind.parse(kind): count
        for kind, count in {"pointwise/mul|fp32>fp32|a>a": 1.0, "optimizer/x": 2.0, "reduction/y": 2.0}.items()
    },
    host=HostCosts("h", {"launch": 1e-5, "view": 4e-6, "fixed": 1e-4}, {}, {}, 0.0, 0.1, "measured", "cpu"),
    stack={"torch": "2.11.0"},
    provenance={"machine": "0"},
    aliases={"sdpa": "sdpa-flash"},
)

ATTENTION = Piece(
    "attention", parse_variant("fwd/causal/bf16/d128"), (6.0, 1.0, 10.0), 512 * 64 * 1024, 256 * 64 * 1024**2
)


def test_where_an_answer_comes_from_is_said() -> None:
    found = PROFILE.estimate(
        [
            (moved(1 << 20), "torch", "cold"),
            (moved(3 << 19), "torch", "cold"),
            (product(1 << 18, 64, 1 << 17), "torch", "cold"),
            (moved(1 << 20, variant="neg|fp32>fp32|a>a"), "torch", "cold"),
        ]
    )
    assert [estimate.basis for estimate in found] == ["measured", "interpolated", "extrapolated", "extrapolated"]
    assert found[0].seconds == pytest.approx(FLOOR + (1 << 20) / 1.5e12, rel=0.01)
    assert found[0].sigma < found[1].sigma < found[3].sigma


def test_answers_keep_the_order_of_the_requests() -> None:
    pieces = [moved(1 << 16), product(512, 512, 512), ATTENTION, moved(1 << 24, "unheard", "of"), moved(1 << 20)]
    requests = [(piece, "sdpa" if piece is ATTENTION else "torch", "cold") for piece in pieces]
    together = PROFILE.estimate(requests)
    alone = [PROFILE.estimate([request])[0] for request in requests]
    assert [e.source for e in together] == [e.source for e in alone]
    assert [e.seconds for e in together] == pytest.approx([e.seconds for e in alone], rel=1e-12)
    assert PROFILE.estimate([]) == []


def test_sdpa_is_what_torch_picks() -> None:
    named, default = PROFILE.estimate([(ATTENTION, "sdpa-flash", "cold"), (ATTENTION, "sdpa", "cold")])
    assert named == default
    assert PROFILE.default_attention == "sdpa-flash"


def test_another_cache_state_is_scaled_by_the_ratio_of_the_class() -> None:
    piece = moved(1 << 28, variant="add|bf16>bf16|a>a")
    cold, hot = PROFILE.estimate([(piece, "torch", "cold"), (piece, "torch", "hot")])
    assert 0.4 < hot.seconds / cold.seconds < 1.0  # bandwidth doubles, the floor stays
    assert hot.basis == "extrapolated"
    assert hot.sigma > cold.sigma


def test_an_unknown_variant_is_like_its_class_with_the_same_dtypes() -> None:
    fp32 = PROFILE.estimate([(moved(1 << 26, variant="neg|fp32>fp32|a>a"), "torch", "cold")])[0]
    bf16 = PROFILE.estimate([(moved(1 << 26, variant="neg|bf16>bf16|a>a"), "torch", "cold")])[0]
    assert fp32.seconds == pytest.approx(FLOOR + (1 << 26) / 1.5e12, rel=0.03)
    assert bf16.seconds == pytest.approx(FLOOR + (1 << 26) / 1.2e12, rel=0.03)
    assert fp32.sigma >= 0.25


def test_an_unmeasured_dtype_is_scaled_by_its_peak() -> None:
    bf16, fp32 = PROFILE.estimate(
        [(product(4096, 4096, 4096), "torch", "cold"), (product(4096, 4096, 4096, "nt/fp32"), "torch", "cold")]
    )
    assert fp32.seconds / bf16.seconds == pytest.approx(16, rel=0.15)
    assert fp32.sigma >= 0.35


def test_other_layouts_backends_and_batches_are_answered_too() -> None:
    square = product(2048, 2048, 2048)
    batched = Piece(
        "gemm", parse_variant("batched/nt/bf16"), (*square.features, 3.0), 8 * square.bytes, 8 * square.flops
    )
    nt, tn, triton, eight = PROFILE.estimate(
        [
            (square, "torch", "cold"),
            (product(2048, 2048, 2048, "tn/bf16"), "torch", "cold"),
            (square, "triton", "cold"),
            (batched, "torch", "cold"),
        ]
    )
    assert tn.seconds == pytest.approx(nt.seconds, rel=0.1)
    assert triton.sigma > tn.sigma > nt.sigma
    assert 6 < eight.seconds / nt.seconds < 10


def test_an_empty_profile_still_answers_from_bytes_and_flops() -> None:
    bare = replace(PROFILE, surfaces={}, ceilings={}, peaks={}, host=None)
    small, large, matrix = bare.estimate(
        [(moved(1), "torch", "cold"), (moved(1 << 34), "torch", "cold"), (product(8192, 8192, 8192), "torch", "cold")]
    )
    assert small.seconds == pytest.approx(DEFAULT_FLOOR, rel=1e-3)
    assert large.seconds == pytest.approx((1 << 34) / 1e12, rel=0.01)
    assert matrix.seconds > 8192**3 * 2 / 1e14
    assert {e.basis for e in (small, large, matrix)} == {"extrapolated"}
    assert small.sigma >= 0.5


def launched(profile: Profile, *works: Piece, backend: str = "torch") -> list[int]:
    return [one.launches for one in profile.estimate([(work, backend, "cold") for work in works])]


def test_launch_counts_of_a_profile_whose_surfaces_do_not_say() -> None:
    works = moved(1 << 20), moved(1 << 20, "reduction", "y"), moved(1 << 20, "softmax", "z")
    assert launched(PROFILE, *works) == [1, 2, 0]


def test_a_call_launches_what_the_measured_one_most_alike_did() -> None:
    key = SurfaceKey.parse("torch/gemm/nt/bf16/cold")
    surface = PROFILE.surfaces[key]
    counts = tuple(3 if sizes[2] > 10 else 1 for sizes in surface.features)
    assert {1, 3} == set(counts)
    counted = replace(PROFILE, surfaces={**PROFILE.surfaces, key: replace(surface, launches=counts)})
    seen = [product(*(round(2**size) for size in sizes)) for sizes in surface.features]
    assert launched(counted, *seen) == list(counts)
    assert launched(PROFILE, *seen) == [0] * len(counts)
    kept = Profile.from_json(counted.to_json())
    assert kept.surfaces[key].launches == counts
    alike = replace(counted, surfaces={key: replace(surface, launches=(2,) * len(counts))})
    record = alike.to_json()
    assert record["surfaces"][str(key)]["launches"] == (2,)  # one number for all
    assert launched(Profile.from_json(record), *seen) == [2] * len(counts)


def test_heads_that_share_keys_launch_what_others_that_share_did() -> None:
    key = SurfaceKey.parse("sdpa-flash/attention/fwd/causal/bf16/d128/cold")
    surface = PROFILE.surfaces[key]
    counts = tuple(6 if group else 4 for _, group, _ in surface.features)
    near = replace(surface, features=tuple((a, float(i % 2), c) for i, (a, _, c) in enumerate(surface.features)))
    counts = tuple(6 if group else 4 for _, group, _ in near.features)
    profile = replace(PROFILE, surfaces={key: replace(near, launches=counts)})
    pieces = [replace(ATTENTION, features=(a, 1.0 - group, c)) for a, group, c in near.features]
    assert launched(profile, *pieces, backend="sdpa") == [10 - count for count in counts]


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_saved_and_loaded_it_predicts_the_same(tmp_path: Path, name: str) -> None:
    PROFILE.save(tmp_path / name)
    again = Profile.load(tmp_path / name)
    assert again == PROFILE
    requests = [
        (moved(12_345_678), "torch", "hot"),
        (product(1000, 1000, 1000), "torch", "cold"),
        (ATTENTION, "triton", "hot"),
    ]
    assert again.estimate(requests) == PROFILE.estimate(requests)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_same_profile_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        PROFILE.save(tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def broken(**changes: Any) -> bytes:
    return json.dumps({**PROFILE.to_json(), **changes}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a profile"),
        (b"[]", "not a profile"),
        (b'{"schema": 1}', "not a profile"),
        (b"\x1f\x8bnonsense", "not a profile"),
        (gzip.compress(b"{}", mtime=0)[:-3], "not a profile"),
        (gzip.compress(b"{}" * 50, mtime=0)[:10] + b"\xff" * 40, "not a profile"),
        (b"\xff\xfe", "not a profile"),
        (broken(schema=2), "newer than this flopcast"),
        (broken(peaks=None), "peaks is None: valid is an object"),
        (broken(peaks={"bf16": {"value": 1}}), "peaks.bf16.low is missing"),
        (broken(surfaces={"a": {"kind": "magic"}}), "surfaces.a.kind is .magic.: valid is one of memory"),
        (broken(basis="guessed"), "basis"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(DataError, match=message):
        Profile.load(tmp_path / "p.json")


def test_a_missing_file_and_an_unwritable_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="flopcast fit"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="--out"):
        PROFILE.save(Path("/proc/no/folder.json"))


def test_profiles_are_found_by_name(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "test-gpu.json.gz")
    assert list(profiles.known_profiles(tmp_path)) == ["test-gpu"]


def test_importing_profiles_loads_nothing_heavy() -> None:
    code = (
        "import sys, flopcast.roofline.gpu.profile.profile;"
        "print([m for m in ('torch', 'scipy', 'pandas', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
