"""Compiles Triton kernels for a part without having it; run by test_compile_offline.py, in its own process.

    python compile_offline.py CAPABILITY... [--every N]    e.g. 80 89

prints one JSON line per configuration, or per N-th of them: {"sm", "kernel", "config", "registers", "spill_bytes",
"wgmma", "shared_bytes", "limit_bytes"}.
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
    attention,
    fp8_matmul,
    matmul,
    matmul_configs,
    triton_attention,
    triton_matmul,
    triton_matmul_fp8,
    triton_matmul_tma,
)
from flopcast.kernels.shapes import Attention

Case = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]  # config, kernel, types, constants, options
TYPES = {"bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp32": "fp32"}


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK (spilled bytes per thread), SHARED ... as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def compile_one(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int], sm: int) -> Any:
    """`types` names the pointers ("*bf16") and the floats; the rest are i32. Pointers, strides and sizes are
    taken as divisible by 16, as a launch on such operands specialises them."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.startswith("stride") or name in ("M", "N", "K", "seq")
    }
    attributes = {place: value for place, value in divisible.items() if signature[names[place[0]]] != "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def matmul_cases(capability: tuple[int, int]) -> Iterator[Case]:
    for dtype in ("bf16", "tf32", "fp32"):
        for config in matmul_configs.pointer_tiles(dtype, capability):
            # masked on every edge and, for 16 bits, contiguous along m and n: what takes most registers
            layout = "tn" if dtype == "bf16" else "nt"
            unit = {"nt": ("stride_ak", "stride_bk"), "tn": ("stride_am", "stride_bn")}[layout]
            constants: dict[str, Any] = {
                **dict.fromkeys(unit, 1), "stride_cn": 1,
                "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
                "SPLIT": config.split, "EVEN_M": False, "EVEN_N": False, "EVEN_K": False,
                "PRECISION": "tf32" if dtype == "tf32" else "ieee", "PDL": capability[0] == 9,
            }  # fmt: skip
            types = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), f"*{TYPES[dtype]}") | {"partial_ptr": "*fp32"}
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            yield f"{layout} {dtype} {config}", triton_matmul.matmul_kernel, types, constants, options
    yield from tma_cases(capability)


def tma_cases(capability: tuple[int, int]) -> Iterator[Case]:
    """Every tile, in one layout after another, alternately in whole tiles and in parts."""
    tiles = [tile for tile in matmul.candidates("bf16", capability) if tile.kind == "tma"]
    for number, config in enumerate(x for x in tiles if x.kind == "tma"):
        layout = ("nt", "nn", "tn")[number % 3]
        trans_a, trans_b = layout[0] == "t", layout[1] == "t"
        (m, more_m), (n, more_n) = (matmul_configs.blocks(config.block_m), matmul_configs.blocks(config.block_n))
        whole = number % 2 == 0 or more_m + more_n > 0
        k = config.block_k
        sizes = {
            "a_desc": (k, m) if trans_a else (m, k),
            "b_desc": (n, k) if trans_b else (k, n),
            "c_desc": (m, n // config.subtiles),
        }
        if more_m:
            sizes |= {"more_desc": (k, more_m) if trans_a else (more_m, k), "c_more_desc": (more_m, n)}
        elif more_n:
            sizes |= {"more_desc": (more_n, k) if trans_b else (k, more_n), "c_more_desc": (m, more_n)}
        types = {name: f"tensordesc<bf16[{rows},{columns}]>" for name, (rows, columns) in sizes.items()}
        types |= {"c_ptr": "*bf16", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
        constants: dict[str, Any] = {
            "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "MORE_M": more_m, "MORE_N": more_n,
            "TRANS_A": trans_a, "TRANS_B": trans_b, "SUBTILES": config.subtiles, "C_TMA": True,
            "WHOLE": whole, "STREAM": not whole, "REDUCE": False, "PDL": True,
        }  # fmt: skip
        if not more_m + more_n:
            constants |= {"more_desc": None, "c_more_desc": None}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        yield f"{layout} bf16 {config.key}", triton_matmul_tma.matmul_tma_kernel, types, constants, options


def attention_cases(capability: tuple[int, int]) -> Iterator[Case]:
    for head_dim in (64, 128):
        shape = Attention(batch=1, heads=2, kv_heads=1, seq=1024, head_dim=head_dim)
        config = attention.config_for(shape, capability)
        tiles = (
            (triton_attention.forward_kernel, config.forward),
            (triton_attention.dkdv_kernel, config.dkdv),
            (triton_attention.dq_kernel, config.dq),
        )
        for (kernel, tile), banded in ((one, banded) for banded in (False, True) for one in tiles):
            if banded and (head_dim == 64 or capability[0] != 9):
                continue
            types = dict.fromkeys((name for name in kernel.arg_names if name.endswith("_ptr")), "*bf16")
            types |= {
                "spans_ptr": "*i32",
                "lse_ptr": "*fp32",
                "delta_ptr": "*fp32",
                "scale": "fp32",
                "scale_log2": "fp32",
            }
            types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            band = " windows and documents" if banded else ""
            constants = {
                "CAUSAL": True, "D": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
                "WINDOW": 1024 if banded else 0, **({} if banded else {"spans_ptr": None}),
            }  # fmt: skip
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            yield f"d{head_dim} {tile}{band}", kernel, types, constants, options


def fp8_cases() -> Iterator[Case]:
    """The tiles that a product may get, by the number of its rows; scaled per row, which takes more registers."""
    for fast in (False, True):
        for config in dict.fromkeys(fp8_matmul.config_for(rows, 4096, 132, fast) for rows in (256, 1024, 8192)):
            sizes = {"a_desc": (config.block_m, config.block_k), "b_desc": (config.block_n, config.block_k)}
            types = {name: f"tensordesc<fp8e4nv[{rows},{columns}]>" for name, (rows, columns) in sizes.items()}
            types |= {"c_desc": f"tensordesc<bf16[{config.block_m},{config.block_n}]>"}
            types |= {"scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32"}
            constants = {
                "ROW_SCALES": True, "FAST": config.fast, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
            }  # fmt: skip
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            yield f"fp8 {config.key}", triton_matmul_fp8.matmul_fp8_kernel, types, constants, options


def cases(capability: tuple[int, int]) -> list[Case]:
    return [*matmul_cases(capability), *attention_cases(capability), *(fp8_cases() if capability[0] == 9 else ())]


def main(sm: int, every: int) -> None:
    """sm_80 and sm_89 run the same instructions: what both use is compiled once, and must fit the smaller."""
    capability = (sm // 10, sm % 10)
    limit = matmul.shared_memory_limit(capability)
    other = {80: (8, 9), 89: (8, 0)}.get(sm, capability)
    shared = {(case[0], case[1].fn.__name__) for case in cases(other)} if sm != 90 else set()
    for config, kernel, types, constants, options in cases(capability)[::every]:
        common = (config, kernel.fn.__name__) in shared
        if common and sm == 89:
            continue
        compiled = compile_one(kernel, types, constants, options, sm)
        usage = resource_usage(compiled.asm["cubin"])
        row = {
            "sm": sm, "kernel": kernel.fn.__name__, "config": config, "registers": usage["REG"],
            "spill_bytes": usage["STACK"] + usage.get("LOCAL", 0), "wgmma": "wgmma" in compiled.asm["ptx"],
            "shared_bytes": compiled.metadata.shared,
            "limit_bytes": min(limit, matmul.shared_memory_limit(other)) if common else limit,
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", type=int)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    for capability in given.parts:
        main(capability, given.every)
