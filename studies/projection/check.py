"""Projections held against published times of operations, GPU by GPU: errors that nothing was fitted to.

    python -m studies.projection.check DATA_DIR --out reports/projection [--ship] [--no-steps]

DATA_DIR holds the tables (data/README.md there names their sources; none of them ships). "zero-shot" is the projection
from the datasheet and the H200's measurements alone (`lookup.projection`), over every row, and again from those of
another measured GPU, `OTHER`, which says what the choice of the source is worth; "refined" is fitted to one
half of the shapes (`published.Timed.is_held_out` says which) and shown on the other half, beside the zero-shot error of
that half. `--ship` writes the fitted parameters to roofline/data/published, from which the shipped profiles are made.

Not zero-shot in the strictest sense: which effects are modelled was chosen with these errors in view (listed in
`gpu/projection`, `power.py` and `LOOKED_AT`); no constant was fitted to them but the deviations `project.SIGMA`.

Writes checks.csv (a row a GPU, class and stage), by_size.csv, op_efficiency.csv, steps.csv and
steps_fp32.csv (`steps.py`), and README.md, which shows them and
what `measured.py` left below OUT.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.kernels.shapes import Attention, Call, Gemm, Operand
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.library.profiles import PUBLISHED, projection
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.projection.published_fit import Record, apply, estimates, refine
from flopcast.roofline.gpu.projection.published_tables import Timed, read_table
from flopcast.roofline.stream.lowering.describe import describe
from studies.command import parser_of
from studies.projection.targets import FROM_OTHER, OTHER, SOURCE, TARGETS

GEMM_TABLES = {"nvidia-a100-80gb-sxm": "gemm_bf16_a100_sxm.csv.gz", "nvidia-l40s": "gemm_bf16_l40s.csv.gz"}
ATTENTION_TABLE = "attention_forward_bf16_a100_l40s.csv.gz"
POINTWISE_TABLE, EFFICIENCY_TABLE = "pointwise_fp32_l4.csv.gz", "training_op_efficiency_bf16_a100_pcie.csv"
CHECK_COLUMNS = ("gpu", "class", "stage", "rows", "mean_abs_error", "median_error", "p5_error", "p95_error",
                 "coverage90", "target", "met", "what")  # fmt: skip
SIZE_COLUMNS = ("gpu", "class", "stage", "by", "value", "rows", "mean_abs_error", "median_error")
EFFICIENCY_COLUMNS = ("op", "layout", "stage", "m", "n", "k", "batch", "seq", "heads", "kv_heads", "seconds",
                      "forecast", "error")  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """Forecasts of some rows: `logs` of forecast / actual, deviations, and what rows are told apart by."""

    gpu: str
    op_class: str
    stage: str
    what: str
    logs: Array
    sigma: Array
    groups: Mapping[str, Sequence[Any]]

    def row(self) -> dict[str, Any]:
        errors = np.expm1(self.logs)
        mean = float(np.abs(errors).mean())
        target = TARGETS.get((self.gpu, self.op_class, self.stage))
        return {
            "gpu": self.gpu,
            "class": self.op_class,
            "stage": self.stage,
            "rows": len(errors),
            "mean_abs_error": mean,
            "median_error": float(np.median(errors)),
            "p5_error": float(np.quantile(errors, 0.05)),
            "p95_error": float(np.quantile(errors, 0.95)),
            "coverage90": float((np.abs(self.logs) <= Z_90 * self.sigma).mean()),
            "target": target,
            "met": None if target is None else mean <= target,
            "what": self.what,
        }

    def by_size(self) -> list[dict[str, Any]]:
        errors, out = np.expm1(self.logs), []
        for by, values in self.groups.items():
            for value in sorted(set(values)):
                some = errors[[each == value for each in values]]
                out.append(
                    {
                        "gpu": self.gpu, "class": self.op_class, "stage": self.stage, "by": by, "value": value,
                        "rows": len(some), "mean_abs_error": float(np.abs(some).mean()),
                        "median_error": float(np.median(some)),
                    }
                )  # fmt: skip
        return out


# --- tables of products and attention -----------------------------------------------------------------------


def tables_of(gpu: str, data: Path) -> dict[str, list[Timed]]:
    spec = find_spec(gpu)
    return {
        "matmul": list(read_table(data / GEMM_TABLES[gpu], spec).rows),
        "attention forward": list(read_table(data / ATTENTION_TABLE, spec).rows),
    }


def check_tables(gpu: str, data: Path) -> tuple[list[Checked], Record]:
    """The checks of a GPU with tables, and the record of what was fitted to half of their shapes."""
    spec, plain, tables = find_spec(gpu), projection(gpu), tables_of(gpu, data)
    _, record = refine(plain, spec, [row for rows in tables.values() for row in rows], SOURCE, hold_out=True)
    shipped = apply(plain, record)
    checks = []
    for op_class, rows in tables.items():
        held = [row for row in rows if row.is_held_out]
        fitted: tuple[tuple[str, Profile, Record | None, list[Timed], str], ...] = (
            ("zero-shot", plain, None, rows, "every row"),
            (FROM_OTHER, projection(gpu, OTHER), None, rows, "every row"),
            ("zero-shot, held out", plain, None, held, "the half of the shapes that refining does not see"),
            ("refined", shipped, record, held, "the half of the shapes that was not fitted"),
        )
        for stage, profile, given, some, what in fitted:
            seconds, sigma = estimates(profile, spec, some, given)
            actual = np.array([row.seconds for row in some])
            checks.append(Checked(gpu, op_class, stage, what, np.log(seconds / actual), sigma, _groups(op_class, some)))
    return checks, record


def _groups(op_class: str, rows: Sequence[Timed]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"stack": ["/".join(row.source.split("/")[2:]) for row in rows]}
    if op_class == "matmul":
        found["FLOPs, power of ten"] = [int(np.log10(row.work.flops)) for row in rows]
        found["k"] = [row.work.shape.k for row in rows if isinstance(row.work.shape, Gemm)]
    else:
        found["sequence"] = [row.work.shape.seq for row in rows if isinstance(row.work.shape, Attention)]
    return found


# --- element-wise calls on an L4 ----------------------------------------------------------------------------


def check_pointwise(data: Path) -> list[Checked]:
    gpu, rows = "nvidia-l4", read_csv(data / POINTWISE_TABLE)
    works = [describe(pointwise_call(row["op"], int(row["rows"]), int(row["cols"]))) for row in rows]
    actual = np.array([float(row["latency_ms"]) * 1e-3 for row in rows])
    what = "single eager calls, fp32; norm and softmax are not measured on the source: costed by passes and kin"
    ops = {"op": [row["op"] for row in rows]}
    checks = []
    for stage, profile in (("zero-shot", projection(gpu)), (FROM_OTHER, projection(gpu, OTHER))):
        found = profile.estimate([(work, "torch", "cold") for work in works])
        logs = np.log(np.array([f.seconds for f in found]) / actual)
        checks.append(Checked(gpu, "memory-bound", stage, what, logs, np.array([f.sigma for f in found]), ops))
    return checks


def pointwise_call(op: str, rows: int, columns: int) -> Call:
    """The torch call of a row: "add" of two tensors, "addu" of a tensor and a number, "ln" and "softmax" over rows."""
    x = _operand(rows, columns)
    if op == "softmax":
        return Call("aten._softmax.default", (x,), (x,), '[{"t":0},1,false]')
    if op == "ln":
        weight, statistic = _operand(columns), _operand(rows, 1)
        args = f'[{{"t":0}},[{columns}],{{"t":1}},{{"t":2}},1e-05]'
        return Call("aten.native_layer_norm.default", (x, weight, weight), (x, statistic, statistic), args)
    if op in ("relu", "gelu", "tanh"):
        return Call(f"aten.{op}.default", (x,), (x,), '[{"t":0}]')
    name, is_unary = op.removesuffix("u"), op.endswith("u")
    overload = ("Tensor_Scalar" if is_unary else "Tensor_Tensor") if name == "pow" else "Tensor"
    inputs, args = ((x,), '[{"t":0},2.0]') if is_unary else ((x, x), '[{"t":0},{"t":1}]')
    return Call(f"aten.{name}.{overload}", inputs, (x,), args)


def _operand(*shape: int) -> Operand:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Operand(shape, strides, "fp32")


# --- products and attention of training steps on an A100 PCIe -----------------------------------------------


def check_efficiency(data: Path) -> tuple[list[Checked], list[dict[str, Any]]]:
    """SimuMax's table, not fitted: by the projection from the datasheet, and with the ratios that ship for the chip.

    Grouped products and heads of unequal sizes are left out: neither is a call that torch makes. Weight gradients
    there are summed into fp32, which ours are not."""
    gpu = "nvidia-a100-80gb-pcie"
    rows = [row for row in read_csv(data / EFFICIENCY_TABLE) if _training_shape(row) is not None]
    plain = projection(gpu)
    checks, out = [], []
    stages = (("zero-shot", plain), (FROM_OTHER, projection(gpu, OTHER)), ("by the A100 SXM's table", _shipped(plain)))
    for stage, profile in stages:
        works = [describe(s, _backend(s)) for row in rows if (s := _training_shape(row)) is not None]
        found = profile.estimate([(work, work.backend, "cold") for work in works])
        for row, work, estimate in zip(rows, works, found, strict=True):
            shape = work.shape
            flops = work.flops * (2 if isinstance(shape, Attention) and shape.causal else 1)  # counted in full
            actual = flops / (float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12)
            sizes = {name: getattr(shape, name, None) for name in ("m", "n", "k", "batch", "seq", "heads", "kv_heads")}
            out.append(
                {
                    "op": row["op"], "stage": stage,
                    "layout": getattr(shape, "layout", "") or getattr(shape, "direction", ""),
                    **sizes, "seconds": actual, "forecast": estimate.seconds, "error": estimate.seconds / actual - 1,
                    "sigma": estimate.sigma,
                }
            )  # fmt: skip
        for op_class in ("matmul", "sdp_fwd", "sdp_bwd"):
            some = [row for row in out if row["op"] == op_class and row["stage"] == stage]
            logs = np.log1p(np.array([row["error"] for row in some]))
            sigma = np.array([row["sigma"] for row in some])
            name = {"matmul": "matmul of training", "sdp_fwd": "attention forward", "sdp_bwd": "attention backward"}
            what = "SimuMax's efficiencies, TransformerEngine's kernels; attention's FLOPs counted in full"
            groups = {"layout": [row["layout"] for row in some]}
            checks.append(Checked(gpu, name[op_class], stage, what, logs, sigma, groups))
    return checks, out


def _training_shape(row: Mapping[str, str]) -> Gemm | Attention | None:
    """cuBLAS names layouts by columns: its TN is y = x W^T, ours nt; its NT, a weight's gradient, ours tn."""
    if row["op"] == "matmul":
        layout = {"TN": "nt", "NN": "nn", "NT": "tn"}[row["layout"]]
        m, n, k = (int(row[name]) for name in ("m", "n", "k"))
        return Gemm(m=m, n=n, k=k, dtype="bf16", layout=layout)
    if row["op"] in ("sdp_fwd", "sdp_bwd") and row["qk_head_dim"] == row["v_head_dim"]:
        return Attention(
            batch=int(row["batch"]), heads=int(row["head_num"]), kv_heads=int(row["kv_head_num"]),
            seq=int(row["seq_len"]), head_dim=int(row["v_head_dim"]), causal=True, direction=row["op"][4:],
            dtype="bf16",
        )  # fmt: skip
    return None


def _backend(shape: Gemm | Attention) -> str:
    return "torch" if isinstance(shape, Gemm) else "sdpa-flash"


def _shipped(plain: Profile) -> Profile:
    path = PUBLISHED / "nvidia-a100-80gb-sxm.json"
    return apply(plain, json.loads(path.read_text())) if path.is_file() else plain


def read_csv(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(text.decode("utf-8-sig").splitlines()))


# --- the report ---------------------------------------------------------------------------------------------


def write(
    out: Path, checks: Iterable[Checked], efficiency: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> None:
    from studies.projection import report
    from studies.projection import steps as projection_steps

    checks = list(checks)
    rows = [check.row() for check in checks]
    write_rows(out / "checks.csv", CHECK_COLUMNS, rows)
    write_rows(out / "by_size.csv", SIZE_COLUMNS, [row for check in checks for row in check.by_size()])
    write_rows(out / "op_efficiency.csv", EFFICIENCY_COLUMNS, efficiency)
    sizes = [row for check in checks for row in check.by_size()]
    fp32 = projection_steps.read(out / "steps_fp32.csv")
    judged = {path.parent.name: read_csv(path) for path in sorted(out.glob("*/classes.csv"))}
    (out / "README.md").write_text(report.page(rows, sizes, steps, fp32, judged))


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Remakes reports/projection from the tables."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("reports/projection"))
    parser.add_argument("--ship", action="store_true", help="write the fitted parameters that ship")
    parser.add_argument("--no-steps", action="store_true", help="leave the training steps as steps.csv has them")
    given = parser.parse_args(arguments)
    checks: list[Checked] = []
    for gpu in GEMM_TABLES:
        found, record = check_tables(gpu, given.data)
        checks += found
        if given.ship:
            PUBLISHED.mkdir(exist_ok=True)
            (PUBLISHED / f"{gpu}.json").write_text(json.dumps(record, indent=1) + "\n")
    checks += check_pointwise(given.data)
    more, efficiency = check_efficiency(given.data)
    checks += more
    given.out.mkdir(parents=True, exist_ok=True)
    steps = _steps(given.data, given.out, remake=not given.no_steps)
    write(given.out, checks, efficiency, steps)
    for check in checks:
        row = check.row()
        say(
            f"{row['gpu']:24} {row['class']:20} {row['stage']:24} {row['rows']:6} rows, mean |error| "
            f"{row['mean_abs_error']:.1%}, 90% interval holds {row['coverage90']:.0%}"
        )


def _steps(data: Path, out: Path, *, remake: bool) -> list[dict[str, Any]]:
    from studies.projection import steps as projection_steps

    path = out / "steps.csv"
    if remake:
        projection_steps.write(data, path)
    return projection_steps.read(path)


if __name__ == "__main__":
    main()
