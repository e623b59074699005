"""Regenerates the table of matmul configurations: proposes, compiles, checks and times them, and records everything.

1. For every shape the cost model proposes configurations. Each kernel that they need is compiled in a process of
   its own, many at a time, and checked on odd sizes: bit-exact on small integers, by the FlashAttention criterion on
   standard-normal operands. Kernels that spill registers, do not fit or are wrong are dropped, with the reason.
2. Shapes are taken in shuffled order. Each configuration must give the exact product of small integers at that very
   shape; then all are timed a few times with a cold cache, and the best three, once their rounding is checked, are
   timed again, interleaved with cuBLAS.

`matmul_tuning.jsonl` has one line per check and per timing, appended as it is made: a run that is stopped loses
one line at most, and the next continues where it stopped (`record.py`). `check.py` is the first stage, `table.py`
makes the table from the record, `shapes.py` lists the shapes that are tuned.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flopcast.errors import UsageError
from flopcast.kernels import matmul
from flopcast.kernels.matmul_configs import MatmulConfig
from flopcast.kernels.matmul_law import proposals
from flopcast.kernels.references import max_difference
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.timing.cuda_timer import CudaTimer
from flopcast.microbench.timing.interleave import calls_in_graph, contender, operand_sets, read
from flopcast.microbench.timing.policy import QUICK
from flopcast.microbench.tuning.check import BITWISE, Say, check_all, exact_product, kernel_of, rounding, small_integers
from flopcast.microbench.tuning.record import RECORDS, Row, append, mend, rows
from flopcast.microbench.tuning.shapes import grid
from flopcast.microbench.tuning.table import again, configurations, ratios, summary, table, write_table

PROPOSALS = 24
FINALISTS = 3
Propose = Callable[[Gemm, int], Sequence[MatmulConfig]]  # of a shape and the count of multiprocessors


class Tuner:
    """Times configurations of one shape after another, all on the timer's stream."""

    def __init__(self, timer: CudaTimer, path: Path, say: Say) -> None:
        self.timer, self.path, self.say = timer, path, say

    def tune(self, shape: Gemm, configs: Sequence[MatmulConfig]) -> None:
        """Times one shape: writes one row per configuration, a second one per finalist, and one for cuBLAS."""
        device, layout = self.timer.device, shape.layout
        base: Row = {"kind": "time", "layout": layout, "m": shape.m, "n": shape.n, "k": shape.k}
        out = torch.empty((shape.m, shape.n), dtype=torch.bfloat16, device=device)

        def bound(x: Sequence[Tensor], config: MatmulConfig) -> Callable[[], Tensor]:
            return lambda: matmul.matmul_triton(x[0], x[1], layout, config=config, out=x[2])

        def library_call(x: Sequence[Tensor]) -> Callable[[], Tensor]:
            a = x[0] if layout[0] == "n" else x[0].mT
            b = x[1] if layout[1] == "n" else x[1].mT
            return lambda: torch.mm(a, b, out=x[2])

        integers = small_integers(shape, device)
        exact = exact_product(integers, layout)
        sound = []
        for config in configs:
            row = base | {"config": config.key, "round": 0}
            try:
                out.fill_(float("nan"))
                if torch.equal(bound((*integers, out), config)(), exact):
                    sound.append(config)
                else:
                    append(self.path, row | {"status": "wrong", "reason": BITWISE})
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                append(self.path, row | {"status": "error", "reason": reason})
        del exact, integers

        pair = matmul.operands(shape, device)
        estimate = max(shape.flops / 5e14, shape.bytes / 4e12, 4e-6)
        count = calls_in_graph(estimate)
        sets = operand_sets((*pair, out), self.timer.cache_bytes, count)
        found = {}
        for config in sound:
            try:
                found[config] = contender(self.timer, [bound(x, config) for x in sets], count)
                torch.cuda.synchronize(device)
            except Exception as error:
                found.pop(config, None)
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                append(self.path, base | {"config": config.key, "round": 1, "status": "error", "reason": reason})
        library = contender(self.timer, [library_call(x) for x in sets], count)
        read(self.timer, [library, *found.values()], 3)  # in turn: all see one clock
        for config, each in found.items():
            row = {"config": config.key, "round": 1, "status": "ok", "seconds": each.seconds}
            append(self.path, base | row | {"library_seconds": library.seconds})

        finalists = sorted(found, key=lambda config: found[config].seconds)[:FINALISTS]
        ref = matmul.reference(pair, shape)
        library_error = max_difference(library_call((*pair, out))(), ref)
        for each in (library, *(found[config] for config in finalists)):
            each.readings.clear()
        for config in finalists:
            ratio = rounding(bound((*pair, out), config)(), ref, library_error)
            if ratio > 1:
                reason = f"error {ratio:.2f} times what is admitted"
                append(self.path, base | {"config": config.key, "round": 2, "status": "wrong", "reason": reason})
        del ref
        read(self.timer, [library, *(found[config] for config in finalists)], 5)
        for config in finalists:
            row = {"config": config.key, "round": 2, "status": "ok", "seconds": found[config].seconds}
            append(self.path, base | row)
        append(self.path, base | {"config": "cublas", "round": 2, "status": "ok", "seconds": library.seconds})


def tune_matmul(
    out: Path, budget: float, say: Say, shapes: Iterable[Gemm] | None = None, workers: int | None = None,
    count: int = PROPOSALS, again_below: float = 0.0, propose: Propose | None = None, in_order: bool = False,
) -> Row:  # fmt: skip
    """Tunes as many shapes as the budget (seconds) allows, into `out`, and writes the table of all shapes on record.

    Shapes that the record in `out` holds are not tuned again, except those at less than `again_below` of cuBLAS's
    speed: they are tuned with their finalists and with configurations that the record lacks.

    `propose` names the configurations to try at a shape, in place of the `count` first of `proposals`; `in_order`: the
    shapes are taken as they come, not shuffled.

    Returns {"out", "table", "shapes", "tuned", "dropped", "seconds"}. Raises UsageError without a CUDA device that
    has tensor-memory copies.
    """
    if not torch.cuda.is_available():
        raise UsageError("tune-kernels runs on a GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    capability = (facts.major, facts.minor)
    if capability[0] != 9:
        raise UsageError(
            f"tune-kernels tunes the kernel with tensor-memory copies, which needs sm_90, and this is sm_"
            f"{facts.major}{facts.minor}: other parts choose by the cost model"
        )
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    path = out / RECORDS
    mend(path)
    known = rows(path, say)
    ratio = ratios(known)
    done = {place for place, value in ratio.items() if value >= again_below}
    todo = [
        shape
        for shape in (grid() if shapes is None else shapes)
        if (shape.layout, shape.m, shape.n, shape.k) not in done
    ]
    sms = facts.multi_processor_count
    tried = configurations(known)
    wanted = {
        shape: again(proposals(shape, sms, capability, 200), tried[place])
        if (place := (shape.layout, shape.m, shape.n, shape.k)) in tried
        else propose(shape, sms)
        if propose
        else proposals(shape, sms, capability, count)
        for shape in todo
    }
    kernels = dict.fromkeys(
        (kernel_of(config), shape.layout) for shape, configs in wanted.items() for config in configs
    )
    workers = workers or min(16, os.cpu_count() or 1)
    say(f"{len(todo)} shapes to do; {len(kernels)} kernels to compile and check, in {workers} processes")
    begun = len(rows(path))
    check_all(list(kernels), path, workers, started + 0.6 * budget, say)
    status = {(row["kernel"], row["layout"]): row["status"] for row in rows(path)[begun:] if row["kind"] == "check"}
    say(f"compiled and checked after {time.monotonic() - started:.0f} s")

    if not in_order:
        random.Random(0).shuffle(todo)
        # those that lose first
        todo.sort(key=lambda shape: ratio.get((shape.layout, shape.m, shape.n, shape.k), 0.0) >= 1)
    timer = CudaTimer(device, replace(QUICK, warm_up_seconds=0.5))
    tuner = Tuner(timer, path, say)
    tuned = 0
    with torch.cuda.stream(timer.stream):
        timer.warm_up()
        for number, shape in enumerate(todo, start=1):
            if time.monotonic() - started > budget:
                say(f"{budget:.0f} s are over: {len(todo) - number + 1} shapes are left for another run")
                break
            configs = [config for config in wanted[shape] if status.get((kernel_of(config), shape.layout)) == "ok"]
            try:
                tuner.tune(shape, configs)
                tuned += 1
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                append(path, {"kind": "shape", "key": shape.key, "status": "error", "reason": reason})
                say(f"{shape.key}: {reason}")
            if tuned % 20 == 0:
                torch.cuda.empty_cache()
                say(f"{number} of {len(todo)} shapes, {time.monotonic() - started:.0f} s")
    table_path = out / "matmul_table.json"
    document = table(rows(path), facts.name, facts.multi_processor_count, capability)
    write_table(document, table_path)
    say(summary(rows(path)))
    return {
        "out": str(out), "table": str(table_path), "shapes": len(todo), "tuned": tuned,
        "dropped": sum(1 for value in status.values() if value != "ok"),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
