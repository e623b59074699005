"""Computes a fingerprint of the Triton kernels that a row was measured with. Does not import torch.

The stack in machine.json identifies the kernels of torch that ran. Triton's kernels are part of this repository and
change with its commits, so that a row measured with one version says nothing about the next. Therefore rows of backend
"triton" carry the fingerprint of the kernels that ran (`kernels_of`), a bench measures again what was measured with
other sources, and a profile is fitted only from rows of the present kernels. The same holds for the few calls of torch
whose time depends on the values in their operands (`OPERANDS`).

A fingerprint covers the code that an operation's operators use and its tables of configurations. It does not depend on
which files hold them or how they are formatted: see `kernel_code.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from flopcast.kernels import shapes
from flopcast.kernels.attention_config import ONE_PASS_LEAST, one_pass_from
from flopcast.microbench.records import kernel_code
from flopcast.microbench.records.rows import OperationRow, Row

BACKEND = "triton"

TWO_KERNELS = "8583686fc507"  # attention, until long causal backwards of head size 128 took one pass
ONE_PASS = "3d7e077d0c7f"  # while they did so from ONE_PASS_LEAST on whatever their groups, by kernels of other names

MEASURED_BY = "NVIDIA H200"  # by whose lengths the rows of both are judged, two of an H100 too

# Old fingerprints -> present ones, for rows measured earlier with kernels that have not changed since.
# Made at commit bbe66647b3c6, which replaced fingerprints of files' names and lines by those of an operation's code:
# the keys are of that commit's kernels, unchanged since 427e2051eeb0. A line is removed when its kernels change.
EARLIER = {
    "dcd8d4b1357f": "abdff7205d52",  # attention
    "612da963ebde": "fa6bfb386230",  # rms_norm
    "c44a3c5f1233": "669004a162fc",  # rope_qk_norm
    "77ebb4dfc0db": "b8ccc6ca314f",  # swiglu
    "db8fc63faa1b": "8219464ee762",  # cross_entropy
    # while long causal backwards of head size 128 took two kernels: shorter ones still do (`_is_of_others`)
    TWO_KERNELS: "abdff7205d52",  # attention
    ONE_PASS: "abdff7205d52",  # attention
    # before the tables of these were read by `flopcast.decode`, which changes no configuration
    "f5eb006da9ef": "abdff7205d52",  # attention
    # while causal backwards of head size 128 took these variants up to 8,192 tokens
    "c09710e7ac44": "abdff7205d52",  # attention
    # before they took them: all other calls run what they ran (`_is_of_others`)
    "41b8e46e5419": "abdff7205d52",  # attention
    # before what the host asks anew at every call was kept between calls
    "a45411996e02": "fa6bfb386230",  # rms_norm
    "0b6753ef7af4": "669004a162fc",  # rope_qk_norm
    "8f737f637d18": "b8ccc6ca314f",  # swiglu
    "de554812951d": "8219464ee762",  # cross_entropy
    # before launches were divided by `sizes`, whose numbers are those of Triton's functions
    "c8d6bcc5bb8e": "abdff7205d52",  # attention
    "ab0701eca850": "fa6bfb386230",  # rms_norm
    "5cf164e26e81": "669004a162fc",  # rope_qk_norm
    "1b9d7286b117": "b8ccc6ca314f",  # swiglu
    "4f0032392f5d": "8219464ee762",  # cross_entropy
    # before sums of losses too were made by these kernels, and losses without a gradient by two for three: no row is of
    # either, and for the rest Triton writes the same PTX
    "1bc90e98f4d2": "8219464ee762",  # cross_entropy
    # before windows and documents, without which Triton writes the same PTX
    "4c18c49a55d7": "abdff7205d52",  # attention
    # while the interpreter was given kernels in Gluon
    "fadfce9a43cb": "39f9d32326f9",  # gemm
    # before trees of tiles were walked by places in flat arrays, which finds the same leaves
    "858bf7046cda": "39f9d32326f9",  # gemm
    # while every tensor of a step was looked at anew
    "43036962e371": "4d9167482660",  # adamw_
    "424aafa9a015": "0d1df41f2956",  # adamw_clipped_
    "675477737b83": "0f000802fdf0",  # gradient_norm
    # while every counter of steps was a tensor by itself
    "2cfd0e8b1f1e": "4d9167482660",  # adamw_
    "b91052b774c1": "0d1df41f2956",  # adamw_clipped_
    "d403a149b901": "0f000802fdf0",  # gradient_norm
}

# Calls of torch whose kernels' sizes depend on the values in their operands -> the version of how the operands are
# made. Version 2 of grouped products has groups as even as a router's; version 1 cut the rows anywhere, and the
# forecast of a Qwen3-MoE step was 19% too long.
OPERANDS = {"_grouped_mm": "operands-2"}

# The operations of those operators and calls whose names differ from their operation's.
_OPERATION = {
    "triton_matmul": "gemm", "triton_attention": "attention", "triton_attention_forward": "attention",
    "add_rms_norm": "rms_norm", "scale_": "cross_entropy",
}  # fmt: skip


def operation_of(shape: Mapping[str, Any]) -> str:
    """The operation of a row's shape; for a call that is not one of flopcast's operators, the call's own name."""
    if shape.get("dtype") == "fp8":
        return "scaled_matmul"
    if shape.get("kind") != "call":
        return str(shape.get("kind"))
    return _operation_of_operator(str(shape.get("op")).split(".")[1])


def _operation_of_operator(name: str) -> str:
    name = name.removesuffix("_backward").removesuffix("_with_gradient")
    return _OPERATION.get(name, name)


@lru_cache
def fingerprint(operation: str, folder: Path = Path(shapes.__file__).parent) -> str:
    """12 hex digits of a hash over the definitions and tables that the operators of an operation use in `folder`."""
    code = kernel_code.parts(folder, lambda name: _operation_of_operator(name) == operation)
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:12]


def kernels_of(shape: Mapping[str, Any], backend: str) -> str | None:
    """The fingerprint of the kernels that a row of this shape would run now; None where torch's version identifies
    them."""
    if not shape:
        return None
    operation = operation_of(shape)
    return fingerprint(operation) if backend == BACKEND else OPERANDS.get(operation)


def kernels_in(row: Row) -> str | None:
    """The fingerprint in a row, in today's form; None where the row has none."""
    told = cast(OperationRow, row).get("kernels_of")
    if not told or (told in EARLIER and _is_of_others(told, row.get("shape") or {})):
        return told
    return EARLIER.get(told, told)


def _is_of_others(told: str, shape: Mapping[str, Any]) -> bool:
    """Whether a fingerprint of EARLIER is of other kernels for this shape: causal backwards of head size 128, without
    windows and documents, which run by the plain kernels; of the last two only those that took one pass and do not now,
    or the other way round."""
    if operation_of(shape) != "attention":
        return False
    if shape.get("kind") == "call":
        return True
    whole = shape.get("head_dim") == 128 and shape.get("direction") == "bwd" and shape.get("causal", True)
    if not whole or shape.get("window") or shape.get("documents", 0) > 1:
        return False
    if told not in (TWO_KERNELS, ONE_PASS):
        return True
    takes_one_pass = shape["seq"] >= one_pass_from(shape["heads"] // shape["kv_heads"], MEASURED_BY)
    took_one_pass = told == ONE_PASS and shape["seq"] >= ONE_PASS_LEAST
    return bool(takes_one_pass != took_one_pass)


def present(rows: Iterable[Row]) -> tuple[list[Row], Counter[str]]:
    """Returns the rows of the present kernels and operands, and by operation how many other rows were left out."""
    kept: list[Row] = []
    others = Counter[str]()
    for row in rows:
        shape = row.get("shape") or {}
        now = kernels_of(shape, row.get("backend", "torch"))
        if now is None or kernels_in(row) == now:
            kept.append(row)
        else:
            others[operation_of(shape)] += 1
    return kept, others


def warning(others: Mapping[str, int]) -> Sequence[str]:
    """The warning about rows that `present` left out; none where there are none."""
    if not others:
        return ()
    count = sum(others.values())
    by_operation = ", ".join(f"{name} {number}" for name, number in sorted(others.items()))
    return (
        f"{count} rows were left out ({by_operation}): they are of other kernels, or other operands, than the present"
        " ones; bench measures these (Triton's alone: --backend triton)",
    )
