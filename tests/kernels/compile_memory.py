"""Compiles the memory-bound Triton kernels for a part without having it; run by test_memory_kernels.py, in its own
process.

    python compile_memory.py CAPABILITY... [--every N]    e.g. 80 90

prints one JSON line per configuration, or per N-th of them: {"sm", "kernel", "config", "registers", "spill_bytes",
"shared_bytes", "limit_bytes", "threads", "accesses": global loads and stores in the PTX, "wide": those of 16 bytes}.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flopcast.kernels import (
    adamw,
    cross_entropy,
    gradient_norm,
    matmul,
    rmsnorm,
    rope,
    swiglu,
    triton_adamw,
    triton_common,
    triton_cross_entropy,
    triton_cross_entropy_split,
    triton_gradient_norm,
    triton_rmsnorm,
    triton_rope,
    triton_swiglu,
)

# name, kernel, pointer and scalar types other than i32, constants, options
Case = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]
# Sizes that a launch on a model's tensors passes as multiples of 16; `numel` of a chunk and strides too.
DIVISIBLE = ("n", "numel", "vocab", "stride", "out_stride")


def pointers(kernel: Any, dtype: str, **others: str) -> dict[str, str]:
    return dict.fromkeys((x for x in kernel.arg_names if x.endswith("_ptr")), f"*{dtype}") | others


def rms_norm_cases(every: bool, part: tuple[int, int]) -> Iterator[Case]:
    """fp32 too: rows twice as long in shared memory."""
    others = {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "eps": "fp32"}
    for n, dtype in (
        *((n, "bf16") for n in ((128, 1024, 4096, 5120, 8192) if every else (1024, 8192))),
        (8192, "fp32"),
    ):
        size = 4 if dtype == "fp32" else 2
        for kernel, direction in (
            (triton_rmsnorm.rms_norm_forward_kernel, "fwd"),
            (triton_rmsnorm.rms_norm_backward_kernel, "bwd"),
        ):
            config = rmsnorm.config_for(n, direction, (size,) * 3, part, residual=True)
            block, rest = rmsnorm.blocks_of(n)
            constants: dict[str, Any] = {"ROWS": config.rows, "BLOCK": block, "REST": rest}
            if direction == "fwd":
                constants |= {"RESIDUAL": True, "WHOLE": n == block, "AHEAD": part[0] == 9}
            else:
                constants |= {"DSUM": True, "SECOND": False, "STAGES": config.num_stages}
            options = {"num_warps": config.num_warps}
            if config.max_registers:
                options["maxnreg"] = config.max_registers
            yield f"n{n} {dtype}", kernel, pointers(kernel, dtype, **others), constants, options


def rope_cases(every: bool, part: tuple[int, int]) -> Iterator[Case]:
    """The backward of 16-bit rows in pairs, from tensors as they are made and from any strides; fp32 element by
    element."""
    fp32 = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "partial_ptr": "*fp32", "eps": "fp32"}
    ahead = part[0] == 9
    for dim in (64, 128) if every else (128,):
        heads: dict[str, Any] = {"HEADS": 16, "KV_HEADS": 8, "D": dim, "HALF": dim // 2}
        kernel, config = triton_rope.rope_forward_kernel, rope.config_for(dim)
        constants = heads | {"ROWS": config.rows}
        yield f"d{dim}", kernel, pointers(kernel, "bf16", **fp32), constants, {"num_warps": config.num_warps}
        kernel, config = triton_rope.rope_backward_kernel, rope.config_for(dim, "bwd")
        options = {"num_warps": config.num_warps, "maxnreg": config.max_registers or 255}
        for dtype in ("bf16", "fp16", "fp32"):
            paired = dtype != "fp32"
            rows = dict.fromkeys(("dq_out_ptr", "dk_out_ptr", "q_ptr", "k_ptr"), "*i32") if paired else {}
            for flat in (True, False):
                constants = heads | {"ROWS": config.rows, "FLAT": flat, "PAIRED": paired, "AHEAD": ahead}
                yield f"d{dim} {dtype}", kernel, pointers(kernel, dtype, **fp32, **rows), constants, options
    kernel = triton_rope.share_sum_kernel
    constants = {"BLOCK_P": 1024, "BLOCK_C": 8, "AHEAD": ahead}
    yield "shares", kernel, pointers(kernel, "fp32"), constants, {"num_warps": 16}


def other_cases() -> Iterator[Case]:
    for kernel, direction in (
        (triton_swiglu.swiglu_forward_kernel, "fwd"),
        (triton_swiglu.swiglu_backward_kernel, "bwd"),
    ):
        block = swiglu.config_for(direction)
        options = {"num_warps": block.num_warps}
        yield direction, kernel, pointers(kernel, "bf16"), {"BLOCK": block.block}, options
    fp32 = dict.fromkeys(("losses_ptr", "lse_ptr", "count_ptr", "dloss_ptr"), "*fp32") | {"target_ptr": "*i64"}
    for kernel, direction in (
        (triton_cross_entropy.forward_kernel, "fwd"),
        (triton_cross_entropy.backward_kernel, "bwd"),
        (triton_cross_entropy.both_kernel, "both"),
        (triton_cross_entropy_split.split_kernel, "split"),
    ):
        vocab = {"both": cross_entropy.WHOLE_ROWS, "split": cross_entropy.config_for("both")}.get(
            direction
        ) or cross_entropy.config_for(direction)
        options = {"num_warps": vocab.num_warps}
        types = pointers(kernel, "bf16", **{k: v for k, v in fp32.items() if k in kernel.arg_names})
        constants = {"BLOCK": vocab.block}
        if direction == "split":
            constants |= {"SPLIT": 19, "SLOTS": 32, "PIECES": 4, "OPAQUE": True}
            types |= {"pairs_ptr": "*i32", "words_ptr": "*i64"}
            options["maxnreg"] = vocab.max_registers or 255
        elif direction != "bwd":
            constants["STAGES"] = vocab.num_stages
        yield direction, kernel, types, constants, options
    kernel, config = triton_adamw.adamw_kernel, adamw.DEFAULT
    types = dict.fromkeys(kernel.arg_names, "fp32")
    types |= {"table_ptr": "*i64", "chunk_tensor_ptr": "*i32", "chunk_index_ptr": "*i32"}
    types["norm_ptr"] = "*fp32"
    for scaled in (False, True):
        constants = {"SCALED": scaled, "ALIGNED": True, "CHUNK": config.chunk, "BLOCK": config.block}
        yield "clipped" if scaled else "aligned", kernel, types, constants, {"num_warps": config.num_warps}
    kernel = triton_gradient_norm.squares_kernel
    constants = {"ALIGNED": True, "CHUNK": gradient_norm.CHUNK, "BLOCK": gradient_norm.BLOCK}
    yield "aligned", kernel, {**types, "partial_ptr": "*fp32"}, constants, {"num_warps": 8}
    kernel = triton_gradient_norm.root_of_sum_kernel
    yield "sums", kernel, pointers(kernel, "fp32"), {"BLOCK": triton_gradient_norm.SUM_BLOCK}, {"num_warps": 8}
    kernel = triton_common.column_sum_kernel
    yield "sums", kernel, pointers(kernel, "fp32"), {"BLOCK_P": 1024, "BLOCK_C": 16}, {"num_warps": 16}


def compile_one(case: Case, sm: int) -> dict[str, Any]:
    name, kernel, types, constants, options = case
    names = kernel.arg_names
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(names)
        if signature[x] != "constexpr" and (signature[x].startswith("*") or x.startswith("stride_") or x in DIVISIBLE)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    # loads, stores and asynchronous copies, whose size in bytes is an operand
    accesses = re.findall(r"(?:ld|st)\.global.*|cp\.async\.c[ag]\.shared.*", compiled.asm["ptx"])
    wide = sum(".v4.b32" in x or ".v2.b64" in x or "], 0x10," in x or "], 16," in x for x in accesses)
    return {
        "sm": sm, "kernel": kernel.fn.__name__, "config": f"{name} {constants} {options}",
        "registers": usage["REG"], "spill_bytes": usage["STACK"] + usage.get("LOCAL", 0),
        "shared_bytes": compiled.metadata.shared, "limit_bytes": matmul.shared_memory_limit((sm // 10, sm % 10)),
        "threads": 32 * options["num_warps"], "wide": wide, "accesses": len(accesses),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", type=int)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    for sm in given.parts:
        is_whole = sm == 90  # the others at the ends of the range
        part = (sm // 10, sm % 10)
        cases = [*rms_norm_cases(is_whole, part), *rope_cases(is_whole, part), *other_cases()]
        for case in cases[:: given.every]:
            print(json.dumps(compile_one(case, sm)), flush=True)
