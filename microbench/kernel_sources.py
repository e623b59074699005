"""Which Triton kernels a row is of: a fingerprint of their sources. No torch.

Torch's kernels are told by the stack in machine.json; these change with every commit, and a row of one is no time of
another. So rows of backend "triton" carry the fingerprint of what ran (`KERNELS`), a bench measures again what another
source was measured of, and a profile is made of rows of the present ones alone. So it is with the few calls of torch
whose time hangs on what is in their operands (`OPERANDS`).

A fingerprint is over the code of an operation's modules and its tables of configurations; comments, docstrings, blank
lines and the Python that runs them change nothing.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flopcast.kernels import shapes
from flopcast.microbench.records import KERNELS

BACKEND = "triton"

# Calls of torch whose operands the sizes of their kernels follow: of how these are made, which version. 2 of grouped
# products: groups as even as a router's (1 cut the rows anywhere: a Qwen3-MoE step was forecast 19% long).
OPERANDS = {"_grouped_mm": "operands-2"}

_ROWWISE = ("rowwise.py", "triton_common.py")
# What an operation's kernels are made of, below `kernels`.
_SOURCES = {
    "gemm": ("matmul.py", "matmul_*.py", "triton_matmul*.py", "data/matmul_*.json"),
    "attention": (
        "attention.py", "attention_config.py", "triton_attention*.py", "data/attention_*.json",
    ),
    "rms_norm": (*_ROWWISE, "rmsnorm.py", "triton_rmsnorm.py", "triton_ahead.py"),
    "rope_qk_norm": (*_ROWWISE, "rope.py", "triton_rope.py", "triton_ahead.py"),
    "swiglu": (*_ROWWISE, "swiglu.py", "triton_swiglu.py"),
    "cross_entropy": (*_ROWWISE, "cross_entropy*.py", "triton_cross_entropy*.py", "data/cross_entropy_*.json"),
    "adamw": (*_ROWWISE, "adamw.py", "triton_adamw.py"),
}  # fmt: skip
_OPERATION = {"add_rms_norm": "rms_norm", "scale_": "cross_entropy"}


def operation_of(shape: Mapping[str, Any]) -> str:
    """The operation that a shape, as a row has it, is of; of a call not known its own name."""
    if shape.get("kind") != "call":
        return str(shape.get("kind"))
    name = str(shape.get("op")).split(".")[1]
    name = name.removesuffix("_backward").removesuffix("_with_gradient")
    return _OPERATION.get(name, name)


@lru_cache
def fingerprint(operation: str, folder: Path = Path(shapes.__file__).parent) -> str:
    """12 hex digits over the sources of an operation's kernels as they lie in `folder`."""
    digest = hashlib.sha256()
    for pattern in _SOURCES.get(operation, ()):
        for path in sorted(folder.glob(pattern)):
            text = path.read_text()
            code = json.dumps(json.loads(text), sort_keys=True) if path.suffix == ".json" else code_of(text)
            digest.update(f"{path.name}\0{code}\0".encode())
    return digest.hexdigest()[:12]


def code_of(source: str) -> str:
    """A module's lines without comments, docstrings, blank lines and trailing blanks."""
    lines: list[str] = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            text = node.body[0]
            for row in range(text.lineno, (text.end_lineno or text.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def kernels_of(shape: Mapping[str, Any], backend: str) -> str | None:
    """The fingerprint of what a row of this shape runs now; None where torch's version says all of it."""
    if not shape:
        return None
    operation = operation_of(shape)
    return fingerprint(operation) if backend == BACKEND else OPERANDS.get(operation)


def present(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(rows without those of other kernels or operands than the present ones, how many were left out by operation)."""
    kept, others = [], Counter[str]()
    for row in rows:
        now = kernels_of(row.get("shape") or {}, row.get("backend", "torch"))
        if now is None or row.get(KERNELS) == now:
            kept.append(row)
        else:
            others[operation_of(row["shape"])] += 1
    return kept, others


def warning(others: Mapping[str, int]) -> Sequence[str]:
    """What is said of the rows left out; nothing where there are none."""
    if not others:
        return ()
    count = sum(others.values())
    by_operation = ", ".join(f"{name} {number}" for name, number in sorted(others.items()))
    return (
        f"{count} rows were left out ({by_operation}): they are of other kernels, or other operands, than the present"
        " ones; bench measures these (Triton's alone: --backend triton)",
    )
