"""Compiles the Hopper attention kernels for sm_90 without a GPU; run by test_attention_hopper.py, in its own process.

    python compile_attention.py HEAD_DIM... [--every N]

prints one JSON line per tile, or N-th tile, that the rule or a shipped table can choose: {"kernel", "tile", "causal",
"registers", "spill_bytes", "shared_bytes", "limit_bytes", "products": matrix instructions, "waits": for them,
"hidden": exponentials made between the wait for one product and the wait for the product issued after it}.
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
from triton.experimental.gluon._runtime import GluonASTSource

from flopcast.kernels import attention_config, triton_attention_launch
from flopcast.kernels import triton_attention_hopper as hopper
from flopcast.kernels import triton_attention_hopper_dkdv as hopper_dkdv
from flopcast.kernels import triton_attention_hopper_dq as hopper_dq
from flopcast.kernels import triton_attention_hopper_onepass as hopper_onepass
from flopcast.kernels.matmul_configs import shared_memory_limit
from flopcast.kernels.shapes import Attention


def tool(name: str, *arguments: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *arguments, file.name], capture_output=True, text=True, check=True).stdout


def matrix(rows: int, dim: int) -> str:
    return f"tensordesc<bf16[1, 1, {rows}, {dim}],{triton_attention_launch.MATRIX!r}>"


def vector(length: int) -> str:
    return f"tensordesc<fp32[1, {length}],{triton_attention_launch.VECTOR!r}>"


def compiled(name: str, tile: attention_config.Tile, dim: int, causal: bool) -> Any:
    """As `triton_attention_launch` would launch it."""
    m, n = tile.block_m, tile.block_n
    constants: dict[str, Any] = {"CAUSAL": causal, "STAGES": tile.num_stages, "SECTIONS": tile.l2_mib > 0}
    half, keys = matrix(64, dim), matrix(n, dim)
    if name == "forward":
        kernel = hopper.forward_kernel
        types = {"q_desc": half, "k_desc": keys, "v_desc": keys, "o_desc": half}
        constants |= {"PACK": tile.pack, "PINGPONG": tile.pingpong, "BLOCK_N": n}
    elif name == "dq":
        kernel = hopper_dq.dq_kernel
        types = dict.fromkeys(("q_desc", "do_desc", "dq_desc"), half) | {"k_desc": keys, "v_desc": keys}
        constants |= {"BLOCK_N": n, "DELTA": tile.delta}
        if tile.delta:
            types["o_desc"] = half
        else:
            constants |= {"o_desc": None, "natural_ptr": None}
    elif tile.onepass:
        kernel = hopper_onepass.onepass_kernel
        types = {"q_desc": matrix(m, dim), "do_desc": matrix(m, dim), "lse_desc": vector(m), "delta_desc": vector(m)}
        types |= dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), matrix(n, dim))
        types["sums_desc"] = f"tensordesc<fp32[{m}, {dim}],{triton_attention_launch.SUMS!r}>"
        types["schedule_ptr"] = "*i32"
        constants = {"CAUSAL": causal, "STAGES": tile.num_stages, "BLOCK_M": m}
    else:
        kernel = hopper_dkdv.dkdv_kernel
        types = {"q_desc": matrix(m, dim), "do_desc": matrix(m, dim), "k_desc": half, "v_desc": half}
        types |= {"dk_desc": half, "dv_desc": half, "lse_desc": vector(m), "delta_desc": vector(m)}
        constants |= {"BLOCK_M": m, "SKIP": tile.skip}
    types = {x: "*fp32" for x in kernel.arg_names if x.endswith("_ptr")} | types
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x].startswith("*")
    }
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.num_warps, "maxnreg": triton_attention_launch.REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def tiles(dim: int) -> Iterator[tuple[str, attention_config.Tile, bool]]:
    """Every one that `config_for` can return; causal, or in full what a table has for that alone."""
    config = attention_config.rule(Attention(batch=1, heads=2, kv_heads=1, seq=1024, head_dim=dim), tma=True)
    chosen = [(name, getattr(config, name), "causal") for name in attention_config.KERNELS]
    if dim == 128:
        chosen.append(("dkdv", attention_config.ONE_PASS, "causal"))
    for table in attention_config.tables():
        for place, by_seq in table.choices.items():
            name, measured, masking = place.split("/")
            chosen += [(name, tile, masking) for tile in by_seq.values() if int(measured) == dim]
    once: dict[tuple[str, str], tuple[attention_config.Tile, bool]] = {}
    for name, tile, masking in sorted(chosen, key=lambda x: x[2]):
        once.setdefault((name, tile.key.removesuffix("/single")), (tile, masking == "causal"))
    for (name, _), (tile, causal) in sorted(once.items()):
        yield name, tile, causal


def hidden_exponentials(sass: str) -> int:
    """The most that lie between a wait that leaves one product running and the next wait for all."""
    most = 0
    for part in re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", sass)[1:]:
        most = max(most, re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", part)[0].count("MUFU.EX2"))
    return most


def main(dim: int, every: int) -> None:
    for name, tile, causal in list(tiles(dim))[::every]:
        kernel = compiled(name, tile, dim, causal)
        usage = tool("cuobjdump", "-res-usage", cubin=kernel.asm["cubin"])
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        sass = tool("cuobjdump", "-sass", cubin=kernel.asm["cubin"])
        row = {
            "kernel": name, "head_dim": dim, "tile": tile.key, "causal": causal, "registers": used["REG"],
            "spill_bytes": used["STACK"] + used.get("LOCAL", 0), "shared_bytes": kernel.metadata.shared,
            "limit_bytes": shared_memory_limit((9, 0)), "products": sass.count("HGMMA"),
            "waits": sass.count("WARPGROUP.DEPBAR"), "hidden": hidden_exponentials(sass),
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", type=int)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    for head_dim in given.parts:
        main(head_dim, given.every)
