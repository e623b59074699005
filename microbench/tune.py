"""Remakes the table of matmul configurations: proposes, compiles, checks, times, keeps a record of everything.

1. For every shape the cost model proposes configurations. Each kernel that they need is compiled in a process of
   its own, many at a time, and checked on odd sizes: bit-exact on small integers, by the FlashAttention criterion on
   standard-normal operands. What spills, does not fit or is wrong is dropped, with the reason.
2. Shapes are taken in shuffled order. Each configuration must give the exact product of small integers at that very
   shape; then all are read a few times, cold, and the best three again, interleaved with cuBLAS, after a check of
   their rounding.

`matmul_tuning.jsonl` has one line for each check and each time, appended as it is made: a run that is stopped loses
one line at most, and the next takes up where it stopped. `table` makes the table of what is there.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.errors import UsageError
from flopcast.kernels import matmul, matmul_table
from flopcast.kernels.matmul_configs import GLUON, STREAM, MatmulConfig, proposals
from flopcast.kernels.references import largest, max_difference
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.cuda_timer import CudaTimer
from flopcast.microbench.interleave import calls_in_graph, contender, operand_sets, read
from flopcast.microbench.timer import QUICK

RECORDS = "matmul_tuning.jsonl"
TOKENS = (1024, 2048, 8192, 16384)
WIDTHS = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 8192)
VOCABULARY, VOCABULARY_WIDTHS = 151_936, (1024, 2048, 4096)
LAYOUTS = ("nt", "nn", "tn")
SPILL_LIMIT = 64  # bytes a thread: a few values kept outside the loops do no harm
PROPOSALS = 24
FINALISTS = 3
AGAIN = 14  # configurations tried where a record is at hand: of those that it does not have
LARGE_SIZES = (4104, 3080, 1032)  # several tiles for each program
ODD_SIZES = (392, 520, 712)  # divided by no tile, rows of whole 16 bytes
EVEN_SIZES = (512, 768, 768)  # divided by every tile: the pointer kernel is another one there
BITWISE = "differs from the exact product of small integers"

Say = Callable[[str], None]
Row = dict[str, Any]


def layer(layout: str, tokens: int, n: int, k: int) -> Gemm:
    """One of the three products of a linear layer [k -> n]: forward nt, dgrad nn, wgrad tn."""
    sizes = {"nt": (tokens, n, k), "nn": (tokens, k, n), "tn": (n, k, tokens)}[layout]
    return Gemm(m=sizes[0], n=sizes[1], k=sizes[2], layout=layout)


def grid() -> list[Gemm]:
    """What is tuned and benchmarked: every token count, width and layout, and the vocabulary."""
    sizes = [nk for w in WIDTHS for nk in ((w, w), (3 * w, w), (w, 3 * w))]
    sizes += [(VOCABULARY, k) for k in VOCABULARY_WIDTHS]
    shapes = [layer(x, t, n, k) for t in TOKENS for n, k in sizes for x in LAYOUTS]
    return list(dict.fromkeys(shapes))


# --- records


def append(path: Path, row: Row) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def mend(path: Path) -> None:
    """Ends a last line cut short by a kill, so that the next one stands by itself."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")


def rows(path: Path) -> list[Row]:
    """All whole lines; a last one cut short by a kill is left out."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


# --- stage 1: compile and check


def kernel_of(config: MatmulConfig) -> str:
    """Names what is compiled: configurations that differ in their group or the number of parts share a kernel."""
    share = config.split if config.split <= 1 else 3
    return replace(config, group_m=4, split=share).key


def small_integers(shape: Gemm, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Operands of -2 ... 2: every partial sum is exact in fp32, so that any order of summation gives the same bits."""
    generator = torch.Generator(device=device).manual_seed(seed)
    pair = []
    for x in (_size_of_a(shape), _size_of_b(shape)):
        pair.append(torch.randint(-2, 3, x, generator=generator, device=device, dtype=torch.int8).bfloat16())
    return pair[0], pair[1]


def _size_of_a(shape: Gemm) -> tuple[int, int]:
    return (shape.m, shape.k) if shape.layout[0] == "n" else (shape.k, shape.m)


def _size_of_b(shape: Gemm) -> tuple[int, int]:
    return (shape.k, shape.n) if shape.layout[1] == "n" else (shape.n, shape.k)


def rounding(out: Tensor, ref: Tensor, torch_error: float) -> float:
    """Error over what the FlashAttention criterion admits: 2 max|torch - ref| + an ulp of the largest. Right at 1 or
    less."""
    limit = 2 * torch_error + largest(ref) * 2.0**-8
    return max_difference(out, ref) / limit


def _checked_sizes(config: MatmulConfig, layout: str) -> list[tuple[int, int, int]]:
    m, n, k = ODD_SIZES
    if config.kind == "pointer":
        return [EVEN_SIZES, (m - 1, n - 3, k - 5)]
    if config.kind in GLUON:
        return [(m, n, k), LARGE_SIZES]
    # in nt, n is free: odd rows of C are stored through pointers
    ragged = layout == "nt" and matmul_table.stores_ragged(config)
    return [(m, n, k), (m, n - 3, k)] if ragged else [(m, n, k)]


def check_kernel(key: str, layout: str) -> Row:
    """Compiles one kernel and runs it on odd sizes, on both kinds of operands. Never raises: the row says what was."""
    started = time.monotonic()
    row: Row = {"kind": "check", "kernel": key, "layout": layout, "status": "ok"}
    try:
        from flopcast.kernels import triton_matmul, triton_matmul_tma

        config = matmul_table.from_key(key)
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
            # few multiprocessors: stream-K deals out some tiles and leaves others whole, and a program of the kernel in
            # Gluon takes one after another; many: stream-K deals out all
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
    except Exception as error:  # a compiler's, a launch's: the others go on
        row |= {"status": "error", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return row | {"seconds": round(time.monotonic() - started, 3)}


def compiled_facts(kernel: Any) -> Row:
    """Registers, spilled bytes and shared memory of what a kernel was last compiled to in this process."""
    worst: Row = {"registers": 0, "spills": 0, "shared_bytes": 0}
    cached = next(iter(kernel.device_caches.values()))[0]
    for compiled in list(cached.values()):
        if getattr(compiled, "n_regs", None) is None:  # not loaded: of a launch that failed
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
    """Checks (kernel, layout) pairs in `workers` processes; a row each. What is not done by the deadline is left, and
    its processes are killed: a kernel that hangs holds no more than its own."""
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


# --- stage 2: time


class Tuner:
    """Times configurations of one shape after another, all on the timer's stream."""

    def __init__(self, timer: CudaTimer, path: Path, say: Say) -> None:
        self.timer, self.path, self.say = timer, path, say

    def tune(self, shape: Gemm, configs: Sequence[MatmulConfig]) -> None:
        """A row for each configuration, a second for the finalists and one for cuBLAS."""
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
        exact = _exact(integers, layout)
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
                read(self.timer, [found[config]], 3)
            except Exception as error:
                found.pop(config, None)
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                append(
                    self.path, base | {"config": config.key, "round": 1, "status": "error", "reason": reason}
                )
        for config, each in found.items():
            append(
                self.path, base | {"config": config.key, "round": 1, "status": "ok", "seconds": each.seconds}
            )

        finalists = sorted(found, key=lambda config: found[config].seconds)[:FINALISTS]
        ref = matmul.reference(pair, shape)
        library_error = max_difference(library_call((*pair, out))(), ref)
        library = contender(self.timer, [library_call(x) for x in sets], count)
        for config in finalists:
            found[config].readings.clear()
            ratio = rounding(bound((*pair, out), config)(), ref, library_error)
            if ratio > 1:
                reason = f"error {ratio:.2f} times what is admitted"
                append(
                    self.path, base | {"config": config.key, "round": 2, "status": "wrong", "reason": reason}
                )
        del ref
        read(self.timer, [library, *(found[config] for config in finalists)], 5)
        for config in finalists:
            row = {"config": config.key, "round": 2, "status": "ok", "seconds": found[config].seconds}
            append(self.path, base | row)
        append(self.path, base | {"config": "cublas", "round": 2, "status": "ok", "seconds": library.seconds})


def _exact(integers: tuple[Tensor, Tensor], layout: str) -> Tensor:
    """The product, rounded once to bf16. fp32 sums of integers below 2^24 are exact; by rows: it may be 10 GB."""
    a, b = integers
    wide = b.float()
    m = a.shape[0] if layout[0] == "n" else a.shape[1]
    out = torch.empty(
        (m, b.shape[1] if layout[1] == "n" else b.shape[0]), dtype=torch.bfloat16, device=a.device
    )
    for start in range(0, m, 2048):
        rows_ = slice(start, start + 2048)
        part = a[rows_] if layout[0] == "n" else a[:, rows_]
        out[rows_] = matmul.matmul_torch(part.float(), wide, layout)
    return out


# --- the whole


def tune_matmul(
    out: Path, budget: float, say: Say, shapes: Iterable[Gemm] | None = None, workers: int | None = None,
    count: int = PROPOSALS, again_below: float = 0.0,
) -> Row:  # fmt: skip
    """Tunes as many shapes as the budget (seconds) allows, into `out`, and writes the table of all there is.

    What the record in `out` holds is not done again, but for shapes at less than `again_below` of cuBLAS's speed: these
    with configurations that it does not have, beside its finalists.

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
    known = rows(path)
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
        shape: again(proposals(shape, sms, capability, 200, new=True), tried[place])
        if (place := (shape.layout, shape.m, shape.n, shape.k)) in tried
        else proposals(shape, sms, capability, count, new=True)
        for shape in todo
    }
    kernels = dict.fromkeys(
        (kernel_of(config), shape.layout) for shape, configs in wanted.items() for config in configs
    )
    workers = workers or min(16, os.cpu_count() or 1)
    say(f"{len(todo)} shapes to do; {len(kernels)} kernels to compile and check, in {workers} processes")
    begun = len(rows(path))
    check_all(list(kernels), path, workers, started + 0.6 * budget, say)
    status = {
        (row["kernel"], row["layout"]): row["status"] for row in rows(path)[begun:] if row["kind"] == "check"
    }
    say(f"compiled and checked after {time.monotonic() - started:.0f} s")

    random.Random(0).shuffle(todo)
    todo.sort(
        key=lambda shape: ratio.get((shape.layout, shape.m, shape.n, shape.k), 0.0) >= 1
    )  # the slower first
    timer = CudaTimer(device, replace(QUICK, warm_up_seconds=0.5))
    tuner = Tuner(timer, path, say)
    tuned = 0
    with torch.cuda.stream(timer.stream):
        timer.warm_up()
        for number, shape in enumerate(todo, start=1):
            if time.monotonic() - started > budget:
                say(f"{budget:.0f} s are over: {len(todo) - number + 1} shapes are left for another run")
                break
            configs = [
                config for config in wanted[shape] if status.get((kernel_of(config), shape.layout)) == "ok"
            ]
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


Place = tuple[str, int, int, int]


def sessions(records: Iterable[Row]) -> dict[Place, tuple[dict[str, float], float]]:
    """(layout, m, n, k) -> (finalists' seconds by configuration, cuBLAS's), of the last time that a shape was done.

    cuBLAS's row ends a shape. Configurations that were wrong there are left out.
    """
    begun: dict[Place, dict[str, float]] = defaultdict(dict)
    wrong: dict[Place, set[str]] = defaultdict(set)
    ended = {}
    for row in records:
        if row["kind"] != "time":
            continue
        place = (row["layout"], row["m"], row["n"], row["k"])
        if row["status"] == "wrong":
            wrong[place].add(row["config"])
        elif row["status"] == "ok" and row["round"] == 2:
            if row["config"] == "cublas":
                times, bad = begun.pop(place, {}), wrong.pop(place, set())
                ended[place] = ({k: v for k, v in times.items() if k not in bad}, row["seconds"])
            else:
                begun[place][row["config"]] = row["seconds"]
    return ended


def configurations(records: Sequence[Row]) -> dict[Place, tuple[list[str], set[str]]]:
    """(layout, m, n, k) -> (finalists of the last time that a shape was done, fastest first; all that was ever timed
    there or was wrong)."""
    timed: dict[Place, set[str]] = defaultdict(set)
    for row in records:
        if row["kind"] == "time":
            timed[row["layout"], row["m"], row["n"], row["k"]].add(row["config"])
    return {
        place: (sorted(times, key=times.__getitem__), timed[place])
        for place, (times, _) in sessions(records).items()
        if times
    }


def again(options: Sequence[MatmulConfig], tried: tuple[list[str], set[str]]) -> list[MatmulConfig]:
    """What is tried where there is a record: its finalists, then AGAIN of the options that it lacks, those of the
    kernel in Gluon before others and no more than half of one kind, and the first of them with fewer and with more
    rows to a group."""
    finalists, timed = tried
    found = [matmul_table.from_key(key) for key in finalists]
    lacking: list[MatmulConfig] = []
    kinds = Counter[str]()
    options = [config for config in options if config.key not in timed]
    for config in sorted(options, key=lambda config: config.kind not in GLUON):
        if len(lacking) < AGAIN and kinds[config.kind] < AGAIN // 2:
            kinds[config.kind] += 1
            lacking.append(config)
    grouped = [
        replace(config, group_m=group)
        for config in lacking[:1]
        if config.split == 1
        for group in (config.group_m // 4, config.group_m // 2, config.group_m * 2)
        if group >= 1
    ]
    return [*found, *lacking, *(config for config in grouped if config.key not in timed)]


def best(records: Iterable[Row]) -> dict[Place, tuple[str, float]]:
    """(layout, m, n, k) -> (configuration, seconds): the fastest of each shape's last session."""
    return {
        place: min(times.items(), key=lambda item: item[1])
        for place, (times, _) in sessions(records).items()
        if times
    }


def table(records: Sequence[Row], device: str, sm_count: int, capability: tuple[int, int]) -> Row:
    """The document that `matmul_table.Table.of` reads."""
    chosen = best(records)
    configs = sorted({config for config, _ in chosen.values()})
    shapes: dict[str, list[list[int]]] = {layout: [] for layout in LAYOUTS}
    for (layout, m, n, k), (config, _) in sorted(chosen.items()):
        shapes.setdefault(layout, []).append([m, n, k, configs.index(config)])
    return {
        "format": matmul_table.FORMAT, "device": device, "sm_count": sm_count, "capability": list(capability),
        "dtype": "bf16", "triton": matmul._triton_version(), "torch": torch.__version__,
        "made": time.strftime("%Y-%m-%d", time.gmtime()), "configs": configs, "shapes": shapes,
    }  # fmt: skip


def write_table(document: Row, path: Path) -> None:
    """JSON with a shape a line."""
    head = {key: value for key, value in document.items() if key not in ("configs", "shapes")}
    lines = json.dumps(head, indent=1)[:-2] + ',\n "configs": [\n'
    lines += ",\n".join(f"  {json.dumps(key)}" for key in document["configs"]) + '\n ],\n "shapes": {\n'
    layouts = []
    for layout, entries in document["shapes"].items():
        layouts.append(
            f'  "{layout}": [\n' + ",\n".join(f"   {json.dumps(entry)}" for entry in entries) + "\n  ]"
        )
    path.write_text(lines + ",\n".join(layouts) + "\n }\n}\n", encoding="utf-8")


def ratios(records: Iterable[Row]) -> dict[Place, float]:
    """cuBLAS's time over the best configuration's, a shape."""
    return {
        place: library / min(times.values()) for place, (times, library) in sessions(records).items() if times
    }


def summary(records: Sequence[Row]) -> str:
    found = ratios(records)
    if not found:
        return "no shape is timed yet"
    large = [value for place, value in found.items() if min(place[1:]) >= 1024]
    lines = [f"cuBLAS's time over ours: {_spread(list(found.values()))}"]
    if large:
        lines.append(f"  m, n, k >= 1024: {_spread(large)}")
    lines += [
        f"  {layout}: {_spread(values)}"
        for layout in LAYOUTS
        if (values := [value for place, value in found.items() if place[0] == layout])
    ]
    lines.append("  least: " + ", ".join(f"{place} {found[place]:.2f}" for place in _least(found, 8)))
    return "\n".join(lines)


def _least(found: dict[Place, float], count: int) -> Iterator[Place]:
    yield from sorted(found, key=lambda place: found[place])[:count]


def _spread(values: Sequence[float]) -> str:
    mean = math.exp(statistics.fmean(math.log(value) for value in values))
    return f"geometric mean {mean:.3f}, least {min(values):.3f}, {len(values)} shapes"
