"""Times single operations and collectives given as rows of a table, for `flopcast kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

from flopcast.errors import UsageError
from flopcast.kernels.attention_config import HEAD_DIMS
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.microbench.recipe.settings import MOST_SEQ
from flopcast.roofline.base.csv_files import Row, check_length, parse_cell
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.library.attention_band import with_band
from flopcast.roofline.gpu.library.attention_dropout import plain
from flopcast.roofline.gpu.links.choice import KINDS
from flopcast.roofline.gpu.links.library import find_interconnect
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import backend_of
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.model.run import Run

MAX_SIZE = 2**40  # of one dimension in `kernels`: beyond it FLOP counts leave the range of a float
MOST_GPUS = 2**20

GEMM_BACKENDS = ("torch", "triton")
ATTENTION_BACKENDS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "triton")
KERNEL_DTYPES = ("bf16", "fp16", "tf32", "fp32")
KERNELS_IN = ("op", "m", "n", "k", "layout", "batch", "heads", "kv_heads", "seq", "head_dim", "causal", "direction",
              "dtype", "backend", "cache", "bytes", "num_gpus", "nodes", "link", "network", "window",
              "documents", "value_dim")  # fmt: skip
KERNELS_OUT = ("seconds", "seconds_low", "seconds_high", "tflops", "bound", "basis", "reason")


def kernels(rows: Sequence[Row], profile: Profile) -> list[dict[str, Any]]:
    """Forecasts the time of each row's operation alone, without launch cost, as graph replay over rotating operands
    would measure it. A row that is not valid keeps its cells and says why in `reason`."""
    out: list[dict[str, Any]] = [dict(row) for row in rows]
    asked: list[tuple[int, Work, str, str]] = []
    for index, row in enumerate(rows):
        try:
            if row.get("op") in KINDS:
                out[index] |= _collective(row, profile)
            else:
                work, backend, cache = _work_of(row)
                if work.op_class == "attention":
                    backend = backend_of(work, Run(attention=backend), profile.default_attention)
                asked.append((index, work, backend, cache))
        except UsageError as fault:
            out[index]["reason"] = str(fault)
    gap = profile.ceiling("graph_gap", 0.0)
    floor = profile.ceiling("kernel_floor", 0.0)
    bandwidth = profile.ceiling("hbm_copy", 0.0)
    rates: dict[str, float] = {}
    estimates = profile.estimate([(plain(work), backend, cache) for _, work, backend, cache in asked])
    for (index, work, backend, _cache), without in zip(asked, estimates, strict=True):
        found = with_band(work, without, profile)
        if profile.device["type"] == "cpu" and backend == "triton":
            out[index]["reason"] = "backend triton needs a GPU"
            continue
        seconds = found.seconds + gap * (without.launches or 1)
        spread = exp(Z_90 * found.sigma)
        dtype = getattr(work.shape, "dtype", "bf16")
        if dtype not in rates:
            rates[dtype] = _rate(dtype, profile)
        out[index] |= {
            "seconds": seconds,
            "seconds_low": seconds / spread,
            "seconds_high": seconds * spread,
            "tflops": work.flops / seconds / 1e12,
            "bound": _bound(work, floor, bandwidth, rates[dtype]),
            "basis": found.basis,
            "reason": "",
        }
    return out


def _collective(row: Row, profile: Profile) -> dict[str, Any]:
    """The time of a collective on the row's link, by default what usually joins these GPUs. Raises UsageError."""
    check_length(row)
    dtype = row.get("dtype") or "bf16"
    _one_of("dtype", dtype, KERNEL_DTYPES)
    nodes = _size(row, "nodes") if row.get("nodes") else 1
    joined = find_interconnect(row.get("link") or profile.gpu, row.get("network") or None)
    whole, gpus = _size(row, "bytes"), _size(row, "num_gpus", MOST_GPUS)
    kind: Any = row["op"]
    found = joined.time(kind, whole, gpus, nodes, dtype)
    times = {"seconds": found.seconds, "seconds_low": found.low, "seconds_high": found.high}
    small = found.regime is not None and found.seconds > 2 * found.least
    return {**times, "bound": "launch" if small else "link", "basis": found.basis, "reason": ""}


def _rate(dtype: str, profile: Profile) -> float:
    """Returns the matrix rate, in FLOP/s, that no operation of this dtype can exceed: the measured burst, else the
    dtype's peak, else the highest peak of the other dtypes, which it is unlikely to exceed."""
    peaks = {name: number.value for name, number in profile.peaks.items()}
    return profile.ceiling(f"matrix_burst/{dtype}", peaks.get(dtype, max(peaks.values(), default=0.0)))


def _bound(work: Work, floor: float, bandwidth: float, rate: float) -> str:
    """Names the longest of three lower bounds on the operation's time: launch floor, bytes, FLOPs."""
    limits = {
        "launch": floor,
        "memory": work.bytes / bandwidth if bandwidth else 0.0,
        "matrix": work.flops / rate if rate else 0.0,
    }
    return max(limits, key=lambda name: limits[name])


def _work_of(row: Row) -> tuple[Work, str, str]:
    """Returns (work, backend, cache) of a row of `kernels`. Raises UsageError for a row that is not valid."""
    check_length(row)
    op = row.get("op") or "gemm"
    cache = row.get("cache") or "cold"
    dtype = row.get("dtype") or "bf16"
    _one_of("cache", cache, ("cold", "hot"))
    _one_of("dtype", dtype, KERNEL_DTYPES)
    if op == "gemm":
        backend = row.get("backend") or "torch"
        layout = row.get("layout") or "nt"
        _one_of("backend", backend, GEMM_BACKENDS)
        _one_of("layout", layout, ("nt", "nn", "tn"))
        m, n, k = (_size(row, name) for name in ("m", "n", "k"))
        return describe(Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout), backend), backend, cache
    if op == "attention":
        backend = row.get("backend") or "sdpa"
        direction = row.get("direction") or "fwd"
        _one_of("backend", backend, ATTENTION_BACKENDS)
        _one_of("direction", direction, ("fwd", "bwd"))
        sizes = {name: _size(row, name) for name in ("batch", "heads", "head_dim")}
        sizes["seq"] = _size(row, "seq", MOST_SEQ)  # limited because the model assigns its blocks one by one
        sizes["kv_heads"] = _size(row, "kv_heads") if row.get("kv_heads") else sizes["heads"]
        if sizes["heads"] % sizes["kv_heads"]:
            raise UsageError(f"heads {sizes['heads']} is not divisible by kv_heads {sizes['kv_heads']}")
        causal = parse_cell("causal", row.get("causal") or "true", bool)
        batch, heads, kv_heads, seq, head_dim = (
            sizes[name] for name in ("batch", "heads", "kv_heads", "seq", "head_dim")
        )
        window, documents = (_size(row, name) if row.get(name) else 0 for name in ("window", "documents"))
        if (window and not causal) or ((window or documents) and backend != "triton"):
            name, value = ("window", window) if window else ("documents", documents)
            raise UsageError(
                f"{name} {value}: valid with backend triton, a window in causal attention; others take a mask for it"
            )
        value_dim = _size(row, "value_dim") if row.get("value_dim") else 0
        if documents > seq:
            raise UsageError(f"documents is {documents}: valid are at most the {seq} tokens of a row")
        if backend == "triton" and head_dim not in HEAD_DIMS:
            raise UsageError(f"head_dim {head_dim} with backend triton: valid are {', '.join(map(str, HEAD_DIMS))}")
        shape = Attention(
            batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, causal=causal, direction=direction,
            dtype="fp32" if dtype == "tf32" else dtype, window=window if window < seq else 0, documents=documents,
            value_dim=value_dim if value_dim != head_dim else 0,
        )  # fmt: skip
        return describe(shape, backend), backend, cache
    raise UsageError(f"op {op!r}: valid are gemm, attention, {', '.join(KINDS)}")


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise UsageError(f"{name} {value!r}: valid are {', '.join(valid)}")


def _size(row: Row, name: str, most: int = MAX_SIZE) -> int:
    if not row.get(name):
        raise UsageError(f"{name} is missing: valid is an integer of at least 1")
    value = int(parse_cell(name, row[name], int))
    if not 1 <= value <= most:
        raise UsageError(f"{name} is {value}: valid is an integer of at least 1, at most {most}")
    return value
