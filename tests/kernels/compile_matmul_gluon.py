"""Compiles the matmul in Gluon for sm_90 without a GPU; run by test_matmul_gluon.py, in its own process.

    python compile_matmul_gluon.py LAYOUT/KEY...      e.g. nt/gluon/128x192x64/w8s4/g8/k1/c1p1

prints one JSON line each: {"layout", "key", "registers", "spill_bytes", "shared_bytes", "products": matrix
instructions, "waits": for them, "serialised": ptxas's notes (C75..) that it runs them one after another}.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flopcast.kernels import triton_matmul_gluon as gluon
from flopcast.kernels.matmul_configs import MatmulConfig, blocks, from_key

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def box(rows: int, columns: int, transposed: bool = False) -> str:
    size = (columns, rows) if transposed else (rows, columns)
    return f"tensordesc<bf16[{size[0]}, {size[1]}],{gluon.shared_layout(*size)!r}>"


def compiled(config: MatmulConfig, layout: str) -> Any:
    """As `triton_matmul_gluon.launch` would launch it."""
    kernel = gluon.matmul_gluon_kernel
    groups, turns, k = config.num_warps // 4, config.kind == "turns", config.block_k
    rows = config.block_m // (1 if turns else groups)
    n1, n2 = blocks(config.block_n)
    trans_a, trans_b = layout[0] == "t", layout[1] == "t"
    types = {
        "a_desc": box(rows, k, trans_a), "b_desc": box(k, n1, trans_b), "more_desc": box(k, n2 or n1, trans_b),
        "c_desc": box(rows, n1 // config.subtiles), "c_more_desc": box(rows, n2 or n1 // config.subtiles),
        "partial_ptr": "*fp32" if config.split > 1 else "*bf16",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "GROUPS": groups, "TURNS": turns, "DRIFT": int(config.kind == "drift"), "A_REGS": config.kind == "regs",
        "ROWS": rows, "N1": n1, "N2": n2, "BLOCK_K": k, "STAGES": config.num_stages, "SUBTILES": config.subtiles,
        "TRANS_A": trans_a, "TRANS_B": trans_b, "SPLIT": config.split > 1, "AHEAD_OF": True,
    }  # fmt: skip
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
    aligned = {(kernel.arg_names.index("partial_ptr"),): [["tt.divisibility", 16]]}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "maxnreg": gluon.REGISTERS[groups][0], "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main(name: str) -> None:
    layout, key = name.split("/", 1)
    kernel = compiled(from_key(key), layout)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(kernel.asm["ptx"])
        said = subprocess.run(
            [TOOLS / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin], capture_output=True, text=True, check=True
        ).stderr
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    row = {
        "layout": layout, "key": key, "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said))), "shared_bytes": kernel.metadata.shared,
        "products": sass.count("HGMMA"), "waits": sass.count("WARPGROUP.DEPBAR"),
        "serialised": len(re.findall(r"C75\d\d", said)),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(argument)
