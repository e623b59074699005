"""Rows of Triton's kernels say which kernels; those of others are measured again and in no profile."""

from __future__ import annotations

import ast
import gzip
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.kernels import shapes
from flopcast.kernels.shapes import Attention, Gemm, shape_to_json
from flopcast.microbench.records import kernel_code, kernel_sources, records
from flopcast.microbench.records.kernel_sources import fingerprint, operation_of, present
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.sweep.cases import Case, case_row
from flopcast.roofline.gpu import suites

ROOT = Path(__file__).resolve().parents[3]
KERNELS = Path(shapes.__file__).parent
GEMM = Gemm(m=256, n=512, k=128)
MACHINE = {"schema": 1, "machine": "aaaa", "device": {"type": "cuda"}, "host": {}, "stack": {}}


def row(shape: Any = GEMM, backend: str = "triton", **fields: Any) -> dict[str, Any]:
    return {**case_row(Case(shape=shape, backend=backend), "quick", {"seconds": 1e-5}), **fields}


OPERATIONS = ("gemm", "attention", "rms_norm", "rope_qk_norm", "swiglu", "cross_entropy")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KERNELS, tmp_path / "kernels"))


def changed_in(folder: Path) -> set[str]:
    return {name for name in OPERATIONS if fingerprint(name, folder) != fingerprint(name)}


def rewrite(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_where_a_kernel_lies_changes_nothing(copied: Path) -> None:
    """A file renamed, a folder made, a table renamed, a definition in another file, a name imported otherwise."""
    (copied / "triton_swiglu.py").rename(copied / "triton_gated.py")
    rewrite(copied / "swiglu.py", ('load_triton("swiglu"', 'load_triton("gated"'))
    (copied / "hopper").mkdir()
    (copied / "triton_attention_hopper.py").rename(copied / "hopper" / "forward.py")
    for name in ("dkdv", "dq", "onepass"):
        rewrite(
            copied / f"triton_attention_hopper_{name}.py",
            ("kernels.triton_attention_hopper ", "kernels.hopper.forward "),
        )
    rewrite(
        copied / "triton_attention_launch.py",
        (
            "from flopcast.kernels import triton_attention_hopper as hopper\n",
            "from flopcast.kernels.hopper import forward\n",
        ),
        (" hopper.forward_kernel", " forward.forward_kernel"),
    )
    (copied / "tables").mkdir()
    (copied / "data" / "matmul_nvidia_h200.json").rename(copied / "tables" / "product_of_an_h200.json")
    rewrite(copied / "matmul_table.py", ('"data"', '"tables"'), ('"matmul_*.json"', '"product_*.json"'))
    name, constant = "LONGEST_ROW", "LONGEST_ROW = 16384\n"
    rewrite(copied / "rowwise.py", (constant, ""))
    rewrite(copied / "rmsnorm.py", (f"    {name},\n", ""), ("\nEPS = ", f"\n{constant}EPS = "))
    assert changed_in(copied) == set()


class _Rewritten(ast.NodeTransformer):
    """Other docstrings, and annotations wherever Triton reads none."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = ast.Name("object")
        for arg in (*node.args.args, *node.args.kwonlyargs):
            if arg.annotation is None or "constexpr" not in ast.unparse(arg.annotation):
                arg.annotation = ast.Name("object")
        said = ast.Expr(ast.Constant("Says something else."))
        node.body = [said, *(node.body[1:] if ast.get_docstring(node) is not None else node.body)]
        return node


def test_how_a_kernel_is_written_down_changes_nothing(copied: Path) -> None:
    """No comments, another layout, docstrings and annotations; definitions in another order; tables in one line."""
    for path in copied.glob("*.py"):
        tree = _Rewritten().visit(ast.parse(path.read_text()))
        tree.body.reverse()
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    for path in copied.glob("data/*.json"):
        table = json.loads(path.read_text(), parse_int=float)
        path.write_text(json.dumps(dict(reversed(table.items()))))
    assert changed_in(copied) == set()


@pytest.mark.parametrize(
    ("file", "old", "new", "operations"),
    [
        ("triton_swiglu.py", "tl.sigmoid(", "1 - tl.sigmoid(", {"swiglu"}),  # a line of a kernel
        ("triton_cross_entropy.py", "VEC = tl.constexpr(8)", "VEC = tl.constexpr(4)", {"cross_entropy"}),
        ("triton_swiglu.py", "BLOCK: tl.constexpr", "BLOCK", {"swiglu"}),
        ("triton_attention_launch.py", "maxnreg=REGISTERS", "maxnreg=128", {"attention"}),
        ("triton_ahead.py", '"launch_pdl": True', '"launch_pdl": False', {"rms_norm", "rope_qk_norm"}),
        ("swiglu.py", "BlockConfig(2048, 8)", "BlockConfig(1024, 8)", {"swiglu"}),  # how it is configured
        ("matmul_law.py", "STREAM_BYTES = 40e6", "STREAM_BYTES = 50e6", {"gemm"}),
        ("data/tiles_nvidia_h200.json", '"triton": "3.6.0"', '"triton": "3.6.1"', {"gemm"}),
        ("matmul_configs.py", "(9, 0): 232448", "(9, 0): 200000", {"gemm", "attention", "rms_norm"}),
        ("data/matmul_nvidia_h200.json", "/w8s5/", "/w8s4/", {"gemm"}),
        ("data/attention_nvidia_h200.json", "hopper/64x128/w4s3", "hopper/64x128/w4s2", {"attention"}),
        ("swiglu.py", "(F.silu(gate) * up,)", "(up * F.silu(gate),)", set()),  # torch's twin
        ("swiglu.py", "swiglu takes gate", "SwiGLU takes gate", set()),  # what is raised
        ("references.py", "def higher_precision(", "def wider(", set()),
    ],
)
def test_a_fingerprint_follows_what_runs(copied: Path, file: str, old: str, new: str, operations: set[str]) -> None:
    rewrite(copied / file, (old, new))
    assert changed_in(copied) == operations


def test_the_kernels_of_every_operation_are_found() -> None:
    """What no operator reaches by name would change without a word."""
    cases = {case for name in ("standard", "full", "fused") for case in suites.load(name)}
    measured = {operation_of(shape_to_json(case.shape)) for case in cases if case.backend == "triton"}
    assert measured == set(OPERATIONS)
    assert len({fingerprint(name) for name in (*OPERATIONS, "no such operation")}) == len(OPERATIONS) + 1
    parts = [json.loads(part) for part in kernel_code.parts(KERNELS, lambda name: True)]
    definitions = [part for part in parts if isinstance(part, list)]
    kernels = {
        (path.name, name)
        for path in KERNELS.glob("triton_*.py")
        for name in re.findall(r"\.jit.*\ndef (\w+)", path.read_text())
        if path.name not in ("triton_read.py", "triton_clock.py")  # probes of memory and clock, of no operation
    }
    assert len(kernels) > 50
    assert {name for _, name in kernels} <= {part[0] for part in definitions if isinstance(part[0], str)}
    assert len(parts) - len(definitions) == len(list(KERNELS.glob("data/*.json")))


# Rows of Triton, and of OPERANDS, in each committed folder: taken, and left out as of other kernels.
COMMITTED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "nvidia-h100-sxm/measurements/gpu0": ({"attention": 5}, {"attention": 5, "gemm": 40}),
    "nvidia-h100-sxm/products": ({"gemm": 680, "attention": 18}, {"attention": 2}),
    "nvidia-h200/bands/kernels": ({"attention": 92}, {}),
    "nvidia-h200/fp8/kernels": ({}, {"scaled_matmul": 160}),  # of the rule of tiles before today's
    "nvidia-h200/fp8/rule": ({"scaled_matmul": 160}, {}),
    "nvidia-h200/steps-on-kernels/fused": ({"cross_entropy": 7, "rms_norm": 132, "rope_qk_norm": 69, "swiglu": 51}, {}),
    "nvidia-h200/optimizers/kernels": ({"adamw_": 23, "adamw_clipped_": 23, "gradient_norm": 24}, {}),
    "nvidia-h200/precisions/kernels": ({"_grouped_mm": 18}, {}),
    "nvidia-h200/measurements-repeat": ({}, {"attention": 10, "gemm": 40}),
    "nvidia-h200/measurements/gpu0": ({}, {"attention": 10, "gemm": 40}),
    "nvidia-h200/measurements/gpu1": ({}, {"attention": 10, "gemm": 40}),
    "nvidia-h200/measurements/gpu10": ({"cross_entropy": 7, "rms_norm": 132, "rope_qk_norm": 69, "swiglu": 51}, {}),
    "nvidia-h200/measurements/gpu11": ({"attention": 7}, {"attention": 4, "gemm": 463}),
    "nvidia-h200/measurements/gpu12": ({"attention": 311}, {"gemm": 120, "attention": 32}),
    "nvidia-h200/measurements/gpu13": ({"attention": 26, "gemm": 720}, {"attention": 2}),
    "nvidia-h200/measurements/gpu2/run0": ({}, {"attention": 10, "gemm": 40}),
    "nvidia-h200/measurements/gpu2/run1": ({}, {"attention": 20, "gemm": 80}),
    "nvidia-h200/measurements/gpu3": ({}, {"attention": 24, "gemm": 100}),
    "nvidia-h200/measurements/gpu4": ({}, {"attention": 10, "gemm": 38}),
    "nvidia-h200/measurements/gpu5/run0": ({"attention": 5}, {"attention": 5, "gemm": 40}),
    "nvidia-h200/measurements/gpu5/run1": ({"_grouped_mm": 15, "attention": 10}, {"attention": 10, "gemm": 80}),
    "nvidia-h200/measurements/gpu5/run2": ({"cross_entropy": 7, "swiglu": 51}, {"rms_norm": 132, "rope_qk_norm": 69}),
    "nvidia-h200/measurements/gpu14": ({"attention": 29}, {"attention": 17}),
    "nvidia-h200/measurements/gpu7": ({"attention": 476}, {"attention": 173}),
    "nvidia-h200/measurements/gpu9": ({"cross_entropy": 7, "rope_qk_norm": 69, "swiglu": 51}, {"rms_norm": 132}),
}


def test_no_committed_row_is_dropped() -> None:
    """After a change of a kernel its rows are of another, and these counts say which are to be measured again. After
    one that changes the fingerprint and nothing on a GPU, `kernel_sources.EARLIER` takes another line."""
    found = {}
    for path in (ROOT / "reports").rglob("measurements.jsonl.gz"):
        lines = gzip.decompress(path.read_bytes()).split(b"\n")
        rows = [json.loads(x) for x in lines if b'"backend":"triton"' in x or b'"kernels_of"' in x]
        kept, others = present(rows)
        if any(row["shape"] for row in rows):
            taken = Counter(operation_of(row["shape"]) for row in kept if row["shape"])
            found[str(path.parent.relative_to(ROOT / "reports"))] = (taken, others)
    assert found == COMMITTED


def test_no_line_of_earlier_fingerprints_is_of_kernels_that_are_gone() -> None:
    names = (*OPERATIONS, "adamw_", "adamw_clipped_", "gradient_norm")
    assert set(kernel_sources.EARLIER.values()) <= {fingerprint(name) for name in names}


def test_rows_of_the_present_kernels_by_an_earlier_name_are_theirs(tmp_path: Path) -> None:
    now, shape = fingerprint("attention"), Attention(batch=1, heads=2, kv_heads=2, seq=64, head_dim=64)
    earlier = next(old for old, new in kernel_sources.EARLIER.items() if new == now)
    rows = [{**row(shape), "kernels_of": earlier}]
    assert present(rows) == (rows, {})
    with Recorder(tmp_path, MACHINE) as recorder:
        recorder.append(rows[0])
        assert recorder.is_done(shape.key, "triton", kernels=now)
    assert records.read(tmp_path).rows[0]["kernels_of"] == earlier


def test_an_earlier_name_is_not_of_the_calls_that_run_other_kernels_since() -> None:
    """Causal backwards of head size 128 alone, without windows and documents; of the last names by length and group."""
    now = fingerprint("attention")
    *_, earlier = (old for old, new in kernel_sources.EARLIER.items() if new == now)
    whole = Attention(batch=1, heads=2, kv_heads=2, seq=4096, head_dim=128, direction="bwd")
    short, grouped = replace(whole, seq=1024), replace(whole, heads=16)
    same = [replace(whole, **other) for other in (
        {"direction": "fwd"}, {"head_dim": 64}, {"causal": False}, {"window": 1024}, {"documents": 4},
    )]  # fmt: skip
    of_others = {
        earlier: (whole, short, grouped), kernel_sources.TWO_KERNELS: (whole,), kernel_sources.ONE_PASS: (grouped,),
    }  # fmt: skip
    for name, others in of_others.items():
        rows = [{**row(shape), "kernels_of": name} for shape in (whole, short, grouped, *same)]
        assert present(rows) == ([one for one in rows if one["key"] not in {x.key for x in others}],
                                 {"attention": len(others)}), name  # fmt: skip
    assert present([row(whole)]) == ([row(whole)], {})


def test_rows_of_other_kernels_are_left_out_and_counted() -> None:
    old = {**row(), "kernels_of": "0" * 12}
    unknown = row(Attention(batch=1, heads=2, kv_heads=2, seq=64, head_dim=64))
    del unknown["kernels_of"]
    rows = [row(), row(backend="torch"), old, unknown, {"key": "scalar/sync", "shape": None, "backend": "torch"}]
    kept, others = present(rows)
    assert kept == [rows[0], rows[1], rows[4]]
    assert others == {"gemm": 1, "attention": 1}
    (said,) = kernel_sources.warning(others)
    assert said.startswith("2 rows were left out (attention 1, gemm 1)")
    assert not kernel_sources.warning({})


@pytest.mark.parametrize("known", [None, "0" * 12])
def test_what_other_kernels_took_is_measured_again(tmp_path: Path, known: str | None) -> None:
    now = fingerprint("gemm")
    with Recorder(tmp_path, MACHINE) as recorder:
        recorder.append({**row(), "kernels_of": known})
        assert recorder.is_done(GEMM.key, "triton")
        assert not recorder.is_done(GEMM.key, "triton", kernels=now)
        recorder.append(row())
        assert recorder.is_done(GEMM.key, "triton", kernels=now)
    with Recorder(tmp_path, MACHINE) as recorder:
        assert recorder.is_done(GEMM.key, "triton", kernels=now)
    assert records.read(tmp_path).latest()[-1]["kernels_of"] == now
