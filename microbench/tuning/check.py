"""Compiles each kernel of a tuning in a process of its own and checks it on odd sizes: the first stage of a tuning.

Results must be bit-exact on small integers and meet the FlashAttention criterion on standard-normal operands. Kernels
that spill registers, do not fit or are wrong are dropped, with the reason.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels import matmul
from flopcast.kernels.matmul_configs import GLUON, STREAM, MatmulConfig, from_key
from flopcast.kernels.matmul_law import stores_ragged
from flopcast.kernels.references import largest, max_difference
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.tuning.record import Row, append

SPILL_LIMIT = 64  # bytes per thread: a few values kept outside the loops do no harm
LARGE_SIZES = (4104, 3080, 1032)  # several tiles per program
ODD_SIZES = (392, 520, 712)  # divisible by no tile; rows are multiples of 16 bytes
EVEN_SIZES = (512, 768, 768)  # divisible by every tile, where the pointer kernel compiles to another variant
BITWISE = "differs from the exact product of small integers"

Say = Callable[[str], None]


def kernel_of(config: MatmulConfig) -> str:
    """Returns the key of the kernel that is compiled for a configuration. Configurations that differ only in their
    group or in the number of parts share a kernel."""
    share = config.split if config.split <= 1 else 3
    return replace(config, group_m=4, split=share).key


def small_integers(shape: Gemm, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Operands of integers -2 ... 2: every partial sum is exact in fp32, so that every order of summation gives the
    same bits."""
    generator = torch.Generator(device=device).manual_seed(seed)
    pair = []
    for x in (_size_of_a(shape), _size_of_b(shape)):
        pair.append(torch.randint(-2, 3, x, generator=generator, device=device, dtype=torch.int8).bfloat16())
    return pair[0], pair[1]


def _size_of_a(shape: Gemm) -> tuple[int, int]:
    return (shape.m, shape.k) if shape.layout[0] == "n" else (shape.k, shape.m)


def _size_of_b(shape: Gemm) -> tuple[int, int]:
    return (shape.k, shape.n) if shape.layout[1] == "n" else (shape.n, shape.k)


def exact_product(integers: tuple[Tensor, Tensor], layout: str) -> Tensor:
    """The exact product, rounded once to bf16: fp32 sums of integers below 2^24 are exact. Computed in blocks of rows,
    because it may take 10 GB."""
    a, b = integers
    wide = b.float()
    m = a.shape[0] if layout[0] == "n" else a.shape[1]
    out = torch.empty((m, b.shape[1] if layout[1] == "n" else b.shape[0]), dtype=torch.bfloat16, device=a.device)
    for start in range(0, m, 2048):
        rows_ = slice(start, start + 2048)
        part = a[rows_] if layout[0] == "n" else a[:, rows_]
        out[rows_] = matmul.matmul_torch(part.float(), wide, layout)
    return out


def rounding(out: Tensor, ref: Tensor, torch_error: float) -> float:
    """The error divided by the limit of the FlashAttention criterion, 2 max|torch - ref| + one ulp of the largest
    element. A result is correct at 1 or less."""
    limit = 2 * torch_error + largest(ref) * 2.0**-8
    return max_difference(out, ref) / limit


def _checked_sizes(config: MatmulConfig, layout: str) -> list[tuple[int, int, int]]:
    m, n, k = ODD_SIZES
    if config.kind == "pointer":
        return [EVEN_SIZES, (m - 1, n - 3, k - 5)]
    if config.kind in GLUON:
        return [(m, n, k), LARGE_SIZES]
    # in nt, n is free: odd rows of C are stored through pointers
    ragged = layout == "nt" and stores_ragged(config)
    return [(m, n, k), (m, n - 3, k)] if ragged else [(m, n, k)]


def check_kernel(key: str, layout: str) -> Row:
    """Compiles one kernel and runs it on odd sizes with both kinds of operands. Never raises: the row reports any
    failure."""
    started = time.monotonic()
    row: Row = {"kind": "check", "kernel": key, "layout": layout, "status": "ok"}
    try:
        from flopcast.kernels import triton_matmul, triton_matmul_tma

        config = from_key(key)
        kernels: Any = triton_matmul_tma
        used: Any = triton_matmul_tma.matmul_tma_kernel
        if config.kind == "pointer":
            used = triton_matmul.matmul_kernel
        elif config.kind in GLUON:
            from flopcast.kernels import triton_matmul_gluon as kernels

            used = kernels.matmul_gluon_kernel

        def run(a: Tensor, b: Tensor, sm_count: int) -> Tensor:
            if config.kind == "pointer":
                return matmul.matmul_triton(a, b, layout, config=config)
            sizes = (shape.m, shape.n, shape.k)
            made: Tensor = kernels.launch(a, b, layout, *sizes, config, sm_count)
            return made

        for size in _checked_sizes(config, layout):
            shape = Gemm(m=size[0], n=size[1], k=size[2], layout=layout)
            tiles = math.ceil(shape.m / config.block_m) * math.ceil(shape.n / config.block_n)
            # With few multiprocessors stream-K splits some tiles and leaves others whole, and a program of the Gluon
            # kernel takes several tiles in turn; with many, stream-K splits all tiles.
            few = max(1, tiles * 2 // (5 * config.per_sm))
            for sm_count in (few, 132) if config.split == STREAM or config.kind in GLUON else (132,):
                a, b = small_integers(shape, "cuda")
                exact = matmul.matmul_torch(a.float(), b.float(), layout).bfloat16()
                for _ in range(3):
                    if not torch.equal(run(a, b, sm_count), exact):
                        return row | {"status": "wrong", "reason": f"{BITWISE} ({shape.key})"}
                pair = matmul.operands(shape, "cuda")
                ref = matmul.reference(pair, shape)
                library = max_difference(matmul.matmul_torch(*pair, layout), ref)
                if (found := rounding(run(*pair, sm_count), ref, library)) > 1:
                    return row | {"status": "wrong", "reason": f"error {found:.2f} times what is admitted"}
        row |= compiled_facts(used)
        if row["spills"] > SPILL_LIMIT:
            row |= {"status": "dropped", "reason": f"spills {row['spills']} bytes a thread"}
    except Exception as error:  # an error of the compiler or the launch must not stop the other checks
        row |= {"status": "error", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return row | {"seconds": round(time.monotonic() - started, 3)}


def compiled_facts(kernel: Any) -> Row:
    """Registers, spilled bytes and shared memory of a kernel as last compiled in this process."""
    worst: Row = {"registers": 0, "spills": 0, "shared_bytes": 0}
    cached = next(iter(kernel.device_caches.values()))[0]
    for compiled in list(cached.values()):
        if getattr(compiled, "n_regs", None) is None:  # not loaded, because its launch failed
            continue
        worst["registers"] = max(worst["registers"], compiled.n_regs)
        worst["spills"] = max(worst["spills"], 4 * (compiled.n_spills or 0))
        worst["shared_bytes"] = max(worst["shared_bytes"], compiled.metadata.shared)
    cached.clear()
    return worst


def _start_worker() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.cuda.init()


def check_all(wanted: Sequence[tuple[str, str]], path: Path, workers: int, deadline: float, say: Say) -> None:
    """Checks (kernel, layout) pairs in `workers` processes and writes one row per pair. Pairs not checked by the
    deadline are left out and their processes killed, so that a kernel that hangs blocks only its own process."""
    if not wanted:
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    futures = {pool.submit(check_kernel, *item): item for item in wanted}
    bad = number = 0
    try:
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            row = future.result()
            append(path, row)
            number += 1
            if row["status"] != "ok":
                bad += 1
                say(f"dropped {row['kernel']} {row['layout']}: {row['status']}, {row.get('reason')}")
            if number % 50 == 0 or number == len(futures):
                say(f"{number} of {len(futures)} kernels compiled and checked, {bad} dropped")
    except FutureTimeout:
        for process in list(pool._processes.values()):
            process.kill()
        say(f"{len(futures) - number} kernels were not checked in the time allowed")
    except BrokenProcessPool:
        say(f"a process that compiles died: {len(futures) - number} kernels are not checked")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
