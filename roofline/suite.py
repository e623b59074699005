"""What to measure: shapes taken from op streams, so that what a step launches is what is measured.

A suite is a JSON file that a person can open, shipped in `data/suites` and made by `python -m
flopcast.roofline.suite` from the traces of the models named here; measuring needs no tracing. Every case has
a role: "fit" cases make the profile, "holdout" cases only judge it, and come from models of their own.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import dist
from pathlib import Path
from typing import Any

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention, Call, Gemm, Shape, shape_from_json, shape_to_json
from flopcast.roofline.lower import Work, describe, lower
from flopcast.roofline.models import depth_for, load_config, make_config
from flopcast.roofline.stream import FOLDED_DEPTH
from flopcast.roofline.stream_cache import Traced, trace_now
from flopcast.roofline.suite_case import HOT_BYTES as HOT_BYTES
from flopcast.roofline.suite_case import SuiteCase


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model and a batch whose step is traced for its shapes."""

    width: int = 0
    config: str = ""  # a shipped config instead of a width
    batch: int = 4
    seq: int = 256
    optimizer: str = "adamw"
    vocab: int = 151_936


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a suite is put together. `per_variant`: calls of one kind of kernel, spread over its sizes."""

    device: str
    fit: tuple[Source, ...]
    holdout: tuple[Source, ...] = ()
    per_variant: int = 10
    per_variant_holdout: int = 3
    caches: tuple[str, ...] = ("cold", "hot")
    gemms: int = 400  # at most, of the streams; the rest is drawn from them
    random_gemms: int = 0
    random_gemms_holdout: int = 0
    attention: tuple[tuple[int, int, int, int, int], ...] = ()  # batch, heads, kv_heads, seq, head_dim
    attention_holdout: tuple[tuple[int, int, int, int, int], ...] = ()
    attention_backends: tuple[str, ...] = ()
    triton_gemms: int = 0
    triton_attention: int = 0
    max_bytes: int = 16 * 10**9


_CUDA_ATTENTION = tuple(
    (batch, heads, kv_heads, seq, 128)
    for heads, kv_heads in ((2, 1), (8, 4), (16, 8), (32, 8))
    for batch, seq in ((4, 256), (8, 512), (1, 1024), (8, 1024), (2, 2048), (4, 4096), (1, 8192))
)
_CUDA_ATTENTION_HOLDOUT = (
    (4, 12, 6, 256, 128), (2, 24, 8, 512, 128), (4, 16, 8, 768, 128), (8, 20, 10, 1024, 128),
    (2, 32, 16, 1536, 128), (1, 16, 8, 3072, 128), (2, 40, 8, 2048, 128), (1, 4, 2, 6144, 128),
)  # fmt: skip

PLANS = {
    "standard": Plan(
        device="cuda",
        fit=(
            *(Source(width=width) for width in (256, 512, 1024, 1536, 2048, 3072, 4096)),
            *(Source(width=width, batch=8, seq=1024, optimizer="adamw-fused") for width in (512, 1024, 2048)),
            Source(width=256, batch=2, seq=4096),
            Source(width=1024, batch=1, seq=4096),
            Source(width=4096, batch=2, seq=2048, optimizer="adamw-fused"),
            Source(width=256, optimizer="adamw-fused"),
            Source(width=640, batch=2, seq=1024),
            Source(width=1792, batch=4, seq=512),
        ),
        holdout=(
            Source(width=896),
            Source(width=2304),
            Source(width=1280, batch=4, seq=512, optimizer="adamw-fused"),
            Source(config="qwen3-1.7b", batch=8, seq=512),
        ),
        random_gemms=90,
        random_gemms_holdout=25,
        attention=_CUDA_ATTENTION,
        attention_holdout=_CUDA_ATTENTION_HOLDOUT,
        attention_backends=("sdpa-cudnn", "sdpa-flash"),
        triton_gemms=40,
        triton_attention=10,
    ),
    "quick": Plan(
        device="cuda",
        fit=(*(Source(width=width) for width in (256, 1024, 2048)), Source(width=1024, batch=8, seq=1024)),
        per_variant=4,
        caches=("cold",),
        gemms=90,
        attention=_CUDA_ATTENTION[::4],
        attention_backends=("sdpa-cudnn", "sdpa-flash"),
        max_bytes=6 * 10**9,
    ),
    "cpu-quick": Plan(
        device="cpu",
        fit=tuple(Source(width=width, batch=1, seq=128, vocab=4096) for width in (64, 128, 256)),
        holdout=(Source(width=160, batch=1, seq=128, vocab=4096),),
        per_variant=3,
        per_variant_holdout=1,
        caches=("cold",),
        gemms=70,
        attention=((1, 1, 1, 128, 128), (1, 2, 1, 128, 128), (1, 2, 1, 256, 128)),
        attention_backends=("sdpa-cpu",),
    ),
}  # fmt: skip


def load(name: str) -> list[SuiteCase]:
    """The cases of a shipped suite. Raises UsageError for an unknown name."""
    path = files("flopcast.roofline") / "data" / "suites" / f"{name}.json.gz"
    if not path.is_file():
        raise UsageError(f"unknown suite {name!r}: valid are {', '.join(sorted(PLANS))}")
    record = json.loads(gzip.decompress(path.read_bytes()))
    shapes = [shape_from_json(shape) for shape in record["shapes"]]
    return [SuiteCase(shapes[i], backend, cache, role) for i, backend, cache, role in record["cases"]]


def save(cases: Sequence[SuiteCase], path: Path) -> None:
    """Writes a suite; the same cases give the same bytes."""
    shapes = list(dict.fromkeys(case.shape for case in cases))
    index = {shape: i for i, shape in enumerate(shapes)}
    record = {
        "shapes": [shape_to_json(shape) for shape in shapes],
        "cases": [[index[case.shape], case.backend, case.cache, case.role] for case in cases],
    }
    path.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), 9, mtime=0))


def build(plan: Plan) -> list[SuiteCase]:
    """Puts the suite together, tracing the plan's models (needs torch and transformers)."""
    rng = random.Random(1)
    fit, held = _works(plan.fit, plan.device), _works(plan.holdout, plan.device)
    fitted_shapes = {work.shape for work in fit}
    held = [work for work in held if work.shape not in fitted_shapes]
    cases = [
        *_call_cases(fit, plan, "fit", plan.per_variant),
        *_call_cases(held, plan, "holdout", plan.per_variant_holdout),
        *_gemm_cases(fit, plan, "fit", plan.random_gemms, rng),
        *_gemm_cases(held, plan, "holdout", plan.random_gemms_holdout, rng),
    ]
    for grid, role in ((plan.attention, "fit"), (plan.attention_holdout, "holdout")):
        for backend in plan.attention_backends:
            cases += [SuiteCase(shape, backend, "cold", role) for shape in _attention_shapes(grid)]
    aligned = [
        c.shape for c in cases if isinstance(c.shape, Gemm) and c.role == "fit" and c.shape.dtype == "bf16"
    ]
    aligned = [
        s for s in dict.fromkeys(aligned) if isinstance(s, Gemm) and s.batch == 1 and s.m * s.n * s.k <= 2**36
    ]
    cases += [
        SuiteCase(s, "triton", "cold", "fit")
        for s in rng.sample(aligned, min(plan.triton_gemms, len(aligned)))
    ]
    few = [shape for shape in _attention_shapes(plan.attention) if shape.seq <= 2048]
    cases += [
        SuiteCase(s, "triton", "cold", "fit") for s in rng.sample(few, min(plan.triton_attention, len(few)))
    ]
    return list(dict.fromkeys(cases))


def _works(sources: Iterable[Source], device: str) -> list[Work]:
    """Everything that the sources' steps run on the device, each shape once."""
    found: dict[tuple[Shape, str], Work] = {}
    for source in sources:
        config = (
            load_config(source.config)
            if source.config
            else make_config(width=source.width, depth=depth_for(256), vocab=source.vocab)
        )
        traced = Traced(batch=source.batch, seq=source.seq, optimizer=source.optimizer, device=device)
        stream = trace_now({**config, "num_hidden_layers": FOLDED_DEPTH}, traced)
        for op in stream.ops:
            lowered = lower(stream, op)
            if lowered is not None and op.kind != "sync":
                found.setdefault(lowered, describe(*lowered))
    return list(found.values())


def _caches(work: Work, plan: Plan) -> tuple[str, ...]:
    return plan.caches if work.bytes <= HOT_BYTES else ("cold",)


def _call_cases(works: Sequence[Work], plan: Plan, role: str, most: int) -> list[SuiteCase]:
    """Of each variant the smallest call, the largest, and some between, evenly over the logarithms of its sizes."""
    variants: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for work in works:
        if isinstance(work.shape, Call) and work.bytes <= plan.max_bytes:
            variants[work.op_class, work.variant].append(work)
    cases = []
    for group in variants.values():
        group.sort(key=lambda work: (work.features, work.shape.key))
        chosen = spread([work.features for work in group], most)
        cases += [
            SuiteCase(group[i].shape, "torch", cache, role)
            for i in chosen
            for cache in _caches(group[i], plan)
        ]
    return cases


def spread(points: Sequence[tuple[float, ...]], most: int) -> list[int]:
    """Indices of at most `most` of the sorted `points`, as far from one another as they come, both ends among them."""
    if len(points) <= most:
        return list(range(len(points)))
    if most == 1:
        return [len(points) // 2]
    chosen = [0, len(points) - 1]
    while len(chosen) < most:
        free = [i for i in range(len(points)) if i not in chosen]
        chosen.append(max(free, key=lambda i: min(dist(points[i], points[c]) for c in chosen)))
    return sorted(chosen)


def _gemm_cases(
    works: Sequence[Work], plan: Plan, role: str, n_random: int, rng: random.Random
) -> list[SuiteCase]:
    gemms = [work for work in works if isinstance(work.shape, Gemm)]
    if len(gemms) > plan.gemms:
        gemms = rng.sample(gemms, plan.gemms)
    drawn = [describe(_random_gemm(rng, layout)) for layout in ("nt", "nn", "tn") for _ in range(n_random)]
    return [SuiteCase(w.shape, "torch", cache, role) for w in (*gemms, *drawn) for cache in _caches(w, plan)]


def _random_gemm(rng: random.Random, layout: str) -> Gemm:
    """256 to 16,384 a side, evenly in the logarithm; half of them aligned to 64, half each side as it comes.

    cuBLAS's choice follows the worst alignment of the three operands, so sides are off by themselves and together.
    """

    def side(multiple: int) -> int:
        return max(multiple, round(2 ** rng.uniform(8, 14) / multiple) * multiple)

    is_aligned = rng.random() < 0.5
    while True:
        m, n, k = (side(64 if is_aligned else rng.choice((1, 1, 2, 8, 64))) for _ in range(3))
        if m * n * k <= 2**38:  # half a second of samples at 600 TFLOP/s
            return Gemm(m=m, n=n, k=k, layout=layout)


def _attention_shapes(grid: Iterable[tuple[int, int, int, int, int]]) -> list[Attention]:
    return [
        Attention(batch=b, heads=h, kv_heads=kv, seq=s, head_dim=d, direction=direction)
        for b, h, kv, s, d in grid
        for direction in ("fwd", "bwd")
    ]


def main() -> None:
    """Remakes the shipped suites."""
    for name, plan in PLANS.items():
        cases = build(plan)
        path = Path(str(files("flopcast.roofline") / "data" / "suites" / f"{name}.json.gz"))
        path.parent.mkdir(parents=True, exist_ok=True)
        save(cases, path)
        kinds: dict[str, Any] = defaultdict(int)
        for case in cases:
            kinds[f"{type(case.shape).__name__}/{case.backend}/{case.role}"] += 1
        print(name, len(cases), dict(kinds), f"{path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
