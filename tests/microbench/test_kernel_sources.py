"""Rows of Triton's kernels say which kernels; those of others are measured again and in no profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcast.kernels import shapes
from flopcast.kernels.shapes import Attention, Gemm, shape_to_json
from flopcast.microbench import kernel_sources, records
from flopcast.microbench.cases import Case, case_row
from flopcast.microbench.kernel_sources import code_of, fingerprint, operation_of, present
from flopcast.microbench.records import Recorder
from flopcast.roofline import suite as suites

KERNELS = Path(shapes.__file__).parent
GEMM = Gemm(m=256, n=512, k=128)
MACHINE = {"schema": 1, "machine": "aaaa", "device": {}, "host": {}, "stack": {}}


def row(shape: Any = GEMM, backend: str = "triton", **fields: Any) -> dict[str, Any]:
    return {**case_row(Case(shape=shape, backend=backend), "quick", {"seconds": 1e-5}), **fields}


def test_comments_and_docstrings_are_no_code() -> None:
    plain = 'def f(a):\n    b = "# no comment"\n    return a + 1\n'
    said = '"""What\nit is."""\n\ndef f(a):  # of one\n    """Adds.\n\n    One.\n    """\n'
    said += '    b = "# no comment"\n\n    return a + 1\n'
    assert code_of(said) == code_of(plain)
    assert code_of(plain.replace("+ 1", "+ 2")) != code_of(plain)


def test_a_fingerprint_follows_the_code_and_the_table(tmp_path: Path) -> None:
    def folder(name: str, kernel: str, table: str, of_others: str = "y = 1\n") -> Path:
        made = tmp_path / name
        (made / "data").mkdir(parents=True)
        (made / "triton_matmul.py").write_text(kernel)
        (made / "triton_attention.py").write_text(of_others)
        (made / "data" / "matmul_nvidia_h200.json").write_text(table)
        return made

    first = fingerprint("gemm", folder("first", "x = 1\n", '{"a": 1, "b": 2}'))
    assert fingerprint("gemm", folder("same", "# said\nx = 1\n", '{"b": 2,\n "a": 1}', "y = 2\n")) == first
    assert fingerprint("gemm", folder("code", "x = 2\n", '{"a": 1, "b": 2}')) != first
    assert fingerprint("gemm", folder("table", "x = 1\n", '{"a": 1, "b": 3}')) != first


def test_every_triton_case_of_the_suites_has_sources() -> None:
    """A new operation needs its modules named: it would have the fingerprint of nothing."""
    cases = {case for name in ("standard", "full", "fused") for case in suites.load(name)}
    operations = {operation_of(shape_to_json(case.shape)) for case in cases if case.backend == "triton"}
    assert {"gemm", "attention", "rms_norm", "rope_qk_norm", "swiglu", "cross_entropy"} <= operations
    assert len({fingerprint(name) for name in operations}) == len(operations)
    assert fingerprint("no such operation") not in {fingerprint(name) for name in operations}
    named = {
        path.name
        for patterns in kernel_sources._SOURCES.values()
        for p in patterns
        for path in KERNELS.glob(p)
    }
    assert {path.name for path in KERNELS.glob("triton_*.py")} - {"triton_read.py"} <= named


def test_rows_of_other_kernels_are_left_out_and_counted() -> None:
    old = {**row(), records.KERNELS: "0" * 12}
    unknown = row(Attention(batch=1, heads=2, kv_heads=2, seq=64, head_dim=64))
    del unknown[records.KERNELS]
    rows = [
        row(),
        row(backend="torch"),
        old,
        unknown,
        {"key": "scalar/sync", "shape": None, "backend": "torch"},
    ]
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
        recorder.append({**row(), records.KERNELS: known})
        assert recorder.is_done(GEMM.key, "triton")
        assert not recorder.is_done(GEMM.key, "triton", kernels=now)
        recorder.append(row())
        assert recorder.is_done(GEMM.key, "triton", kernels=now)
    with Recorder(tmp_path, MACHINE) as recorder:
        assert recorder.is_done(GEMM.key, "triton", kernels=now)
    assert records.read(tmp_path).latest()[-1][records.KERNELS] == now
