"""Reads published tables of operation times; checks each row and refuses bad ones by line number. No torch.

A table is a CSV file with a header, plain or gzipped (.csv.gz), with one row per operation and columns in any order:

matrix products   m, n, k, latency_ms (milliseconds); op linear, gemm or matmul if there is a column op; y[m, n] =
                  x[m, k] W[n, k]^T, or as `layout` says (nt, nn, tn: the product of `Gemm`)
attention         batch, seqlen, q_heads, kv_heads, head_dim, latency_ms. op attention_prefill_causal: a server's
                  forward call, which packs the query heads of a key head into one block and stores keys and values
                  in its cache, two kernels more; op attention: torch's flash, with `causal` (true) and `direction`
                  (fwd, bwd)
both              dtype (bf16, fp16, tf32, fp32); gpu, the device's name as the driver gives it or flopcast's: rows of
                  other GPUs are left out. Other columns (kernel, source_path, ...) are not read.

The columns that `flopcast kernels` reads and writes are taken too: seq, heads and seconds in place of seqlen, q_heads
and latency_ms, both operations in one file. Its own forecasts are refused: measured times have to take their place.

A row is refused where a size is no integer of at least 1, a time is not positive and finite, or the rate it means is
above the GPU's peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import isclose, isfinite, nan
from pathlib import Path

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.base.csv_files import as_row, read_csv
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec, load_specs, spec_of_device
from flopcast.roofline.gpu.catalogue.power import peak_at_max_clock
from flopcast.roofline.stream.lowering.describe import Work, describe

GEMM_OPS, SERVING_OP, ATTENTION_OP = ("linear", "gemm", "matmul"), "attention_prefill_causal", "attention"
GEMM_COLUMNS = ("m", "n", "k")
OTHER_NAMES = {"seq": "seqlen", "heads": "q_heads"}  # of columns: those of `flopcast kernels`
LIBRARY = ("", "torch", "sdpa", "sdpa-flash")  # backends whose times a profile's library surfaces are fitted to
ATTENTION_COLUMNS = ("batch", "seqlen", "q_heads", "kv_heads", "head_dim")
DTYPES = ("bf16", "fp16", "tf32", "fp32")
MAX_SIZE = 2**40
ABOVE_PEAK = 1.15  # cards boost above the clocks of datasheets
SHOWN = 10  # refused rows named in a message


@dataclass(frozen=True)
class Timed:
    """A row: the work, its seconds, whether it is a server's call, the line of the file and its source."""

    line: int
    work: Work
    seconds: float
    is_serving: bool = False
    source: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether the shape belongs to the half that `hold_out` leaves for checking: its key's SHA-256 is odd."""
        return bool(sha256(self.work.shape.key.encode()).digest()[-1] % 2)


@dataclass(frozen=True)
class Table:
    """A file's rows of one GPU. `refused`: (line, reason); `others`: the number of rows of other GPUs."""

    rows: tuple[Timed, ...]
    refused: tuple[tuple[int, str], ...]
    others: int


def read_table(path: Path, spec: GpuSpec) -> Table:
    """Reads a table. Raises UsageError where it cannot be read (as `csv_files.read_csv`) or lacks needed columns."""
    _, columns, lines = read_csv(path)
    known = set(columns)
    columns = [other if (other := OTHER_NAMES.get(name, name)) not in known else name for name in columns]
    _check_columns(path, columns)
    rows, refused, others = [], [], 0
    for line, cells in lines:
        row = as_row(columns, cells)
        try:
            if any(cells[len(columns) :]):
                raise UsageError("the row has more cells than the header")
            if not _is_of(row.get("gpu", ""), spec):
                others += 1
                continue
            rows.append(_timed(line, row, spec))
        except UsageError as fault:
            refused.append((line, str(fault)))
    return Table(tuple(rows), tuple(refused), others)


def refusal(path: Path, table: Table) -> str:
    """The message for a table with refused rows."""
    shown = "; ".join(f"line {line}: {reason}" for line, reason in table.refused[:SHOWN])
    more = f"; and {len(table.refused) - SHOWN} more" if len(table.refused) > SHOWN else ""
    return f"{path}: {len(table.refused)} rows refused: {shown}{more}"


def _check_columns(path: Path, columns: list[str]) -> None:
    wanted = ATTENTION_COLUMNS if "seqlen" in columns and "m" not in columns else GEMM_COLUMNS
    lacking = [name for name in wanted if name not in columns]
    lacking += [] if {"latency_ms", "seconds"} & set(columns) else ["latency_ms"]
    if lacking:
        raise UsageError(
            f"{path}: columns {', '.join(lacking)} are missing: matrix products need {', '.join(GEMM_COLUMNS)}, "
            f"attention {', '.join(ATTENTION_COLUMNS)}, both latency_ms; or the columns of `flopcast kernels`"
        )


def _is_of(name: str, spec: GpuSpec) -> bool:
    """Whether a device's name means this GPU. Raises UsageError for a device that is not known."""
    if not name or name == spec.name:
        return True
    found = load_specs().get(name) or spec_of_device(name)
    if found is None:
        raise UsageError(
            f"gpu {name!r} is not known: for {spec.name} valid are {', '.join((spec.name, *spec.name_match))}"
        )
    return found.name == spec.name


def _timed(line: int, row: Mapping[str, str], spec: GpuSpec) -> Timed:
    op = row.get("op") or (ATTENTION_OP if row.get("seqlen") and not row.get("m") else "gemm")
    if row.get("backend", "") not in LIBRARY or row.get("cache", "") not in ("", "cold"):
        raise UsageError(
            f"backend is {row.get('backend')!r}, cache {row.get('cache')!r}: valid are times of the library (torch, "
            "sdpa) with cold operands"
        )
    dtype = row.get("dtype") or "bf16"
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}: valid are {', '.join(DTYPES)}")
    if op in GEMM_OPS:
        layout = (row.get("layout") or "nt").lower()
        if layout not in ("nt", "nn", "tn"):
            raise UsageError(f"layout is {layout!r}: valid are nt, nn, tn")
        m, n, k = (_size(row, name) for name in GEMM_COLUMNS)
        work = describe(Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout), "torch")
    elif op in (SERVING_OP, ATTENTION_OP):
        work = describe(_attention(row, op, dtype), "sdpa-flash")
    else:
        known = ", ".join((*GEMM_OPS, SERVING_OP, ATTENTION_OP))
        raise UsageError(f"op is {op!r}: valid are {known}")
    name, seconds = _time_column(row), _seconds(row)
    peak = peak_at_max_clock(spec, dtype)
    if peak is None:
        raise UsageError(f"dtype {dtype}: {spec.name} has no matrix units for it")
    if work.flops / seconds > ABOVE_PEAK * peak:
        raise UsageError(
            f"{name} is {row[name]}: {work.flops / seconds / 1e12:.3g} TFLOP/s, above the peak of {peak / 1e12:.4g}; "
            + ("latencies are in milliseconds" if name == "latency_ms" else "seconds are in seconds")
        )
    return Timed(line, work, seconds, op == SERVING_OP, row.get("source_path", ""))


def _attention(row: Mapping[str, str], op: str, dtype: str) -> Attention:
    batch, seq, heads, kv_heads, head_dim = (_size(row, name) for name in ATTENTION_COLUMNS)
    if heads % kv_heads:
        raise UsageError(f"q_heads {heads} is not divisible by kv_heads {kv_heads}")
    causal, direction = row.get("causal") or "true", row.get("direction") or "fwd"
    if causal.lower() not in ("true", "false") or direction not in ("fwd", "bwd"):
        raise UsageError(f"causal is {causal!r}, direction {direction!r}: valid are true, false and fwd, bwd")
    if op == SERVING_OP and (causal.lower() != "true" or direction != "fwd"):
        raise UsageError(f"{SERVING_OP} is causal and forward")
    return Attention(
        batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, causal=causal.lower() == "true",
        direction=direction, dtype=dtype,
    )  # fmt: skip


def _size(row: Mapping[str, str], name: str) -> int:
    text = row.get(name, "")
    try:
        value = int(text.removesuffix(".0"))
    except ValueError:
        raise UsageError(f"{name} is {text!r}: valid is an integer of at least 1") from None
    if not 1 <= value <= MAX_SIZE:
        raise UsageError(f"{name} is {value}: valid is an integer of at least 1, at most {MAX_SIZE}")
    return value


def _seconds(row: Mapping[str, str]) -> float:
    name = _time_column(row)
    value = _number(row.get(name, ""))
    if not (isfinite(value) and value > 0):
        unit = "milliseconds" if name == "latency_ms" else "seconds"
        raise UsageError(f"{name} is {row.get(name, '')!r}: valid is a positive number of {unit}")
    ends = _number(row.get("seconds_low", "")) * _number(row.get("seconds_high", ""))
    if name == "seconds" and isclose(value * value, ends, rel_tol=1e-5):  # a measured time is not the middle of them
        raise UsageError(
            f"seconds is {row[name]}, a forecast of `flopcast kernels`: write the measured time in its place"
        )
    return value * 1e-3 if name == "latency_ms" else value


def _time_column(row: Mapping[str, str]) -> str:
    return "latency_ms" if row.get("latency_ms") or "seconds" not in row else "seconds"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan
