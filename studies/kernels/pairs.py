"""Each Triton kernel against its peers, in one run: matmul against cuBLAS, attention against SDPA's cuDNN and flash.

    python -m studies.kernels.pairs OUT [--only matmul,attention,memory] [--budget 150] [--table TABLE.json]
    python -m studies.kernels.pairs OUT --only matmul --drawn 64,8 [--count 150] [--seed 7]      # random products
    python -m studies.kernels.pairs OUT --only picks --drawn 64,8        # what a patched model would run them on
    python -m studies.kernels.pairs OUT --plot                    # a figure of OUT/kernels.csv, without a GPU

Every kernel is checked against a higher-precision reference before it is timed; a wrong one is a row without a time.
Shapes come in shuffled order. Each shape's contenders are CUDA graphs over rotating operands that together are three
times the L2, replayed in turn, A B A B ..., and the medians compared: a ratio sees one and the same clock. Operands are
standard normal. A row is appended to OUT/kernels.csv as it is done, so that a run cut short keeps its rows; the same
command goes on where it stopped. `--only memory` runs studies/kernels/memory.py and takes its rows over.

`ratio` is the peer's time over ours: above 1, ours is faster. Exit 1 when a result was wrong.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from studies.command import parser_of

COLUMNS = (
    "kernel", "key", "layout", "m", "n", "k", "peer", "seconds", "peer_seconds", "ratio", "flops", "bytes",
    "flops_per_second", "peer_flops_per_second", "error", "peer_error", "tolerance", "readings", "clock_mhz", "config",
    "status", "reason",
)  # fmt: skip
ROUNDS = 7
SEQUENCES = (256, 512, 1024, 2048, 4096, 8192, 16384)
ATTENTION_PEERS = ("sdpa-cudnn", "sdpa-flash")
Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A geometric mean to reach, over the rows that `of` admits."""

    label: str
    of: Callable[[Row], bool]
    mean: float
    least: float = 0.0


def _is_large(row: Row) -> bool:
    return min(int(row["m"]), int(row["n"]), int(row["k"])) >= 1024


def _attention(peer: str, direction: str, head_dim: int, seq_from: int) -> Callable[[Row], bool]:
    def admits(row: Row) -> bool:
        if row["kernel"] != "attention" or row["peer"] != peer or f"/{direction}/" not in row["key"]:
            return False
        return row["key"].endswith(f"d{head_dim}") and int(row["m"]) >= seq_from

    return admits


TARGETS = (
    Target("matmul / cuBLAS, m, n, k >= 1024", lambda r: r["kernel"] == "matmul" and _is_large(r), 1.00, 0.80),
    Target("matmul / cuBLAS, all", lambda r: r["kernel"] == "matmul", 0.92, 0.80),
    Target("attention D128 forward / cuDNN", _attention("sdpa-cudnn", "fwd", 128, 1024), 0.85),
    Target("attention D128 forward / flash", _attention("sdpa-flash", "fwd", 128, 1024), 1.40),
    Target("attention D128 backward / cuDNN", _attention("sdpa-cudnn", "bwd", 128, 1024), 0.65),
    Target("attention D128 backward / flash", _attention("sdpa-flash", "bwd", 128, 1024), 1.15),
    Target("attention D64 forward / flash", _attention("sdpa-flash", "fwd", 64, 1024), 1.15),
    Target("attention D64 backward / flash", _attention("sdpa-flash", "bwd", 64, 1024), 1.15),
)


# --- rows


def read_rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file) if row.get("status")]


def append(path: Path, rows: Iterable[Row]) -> None:
    new = not path.is_file()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Lines: each target against what was reached, and the least ratios."""
    timed = [row for row in rows if row["status"] == "ok" and row["ratio"]]
    for target in TARGETS:
        found = [float(row["ratio"]) for row in timed if target.of(row)]
        if found:
            mean, least = geometric_mean(found), min(found)
            met = mean >= target.mean and least >= target.least
            floor = f", least {least:.3f} (to reach {target.least:.2f})" if target.least else ""
            yield (
                f"{'ok    ' if met else 'MISSED'} {target.label}: {mean:.3f} (to reach {target.mean:.2f}){floor}, "
                f"{len(found)} pairs"
            )
    for layout in ("nt", "nn", "tn"):
        found = [float(row["ratio"]) for row in timed if row["kernel"] == "matmul" and row["layout"] == layout]
        if found:
            yield f"       matmul {layout}: {geometric_mean(found):.3f}, least {min(found):.3f}"
    worst = sorted((row for row in timed if row["kernel"] == "matmul"), key=lambda row: float(row["ratio"]))
    yield from (f"       {float(row['ratio']):.3f} {row['key']} {row['config']}" for row in worst[:12])
    for row in rows:
        if row["kernel"] == "attention" and row["status"] == "ok":
            yield f"       {float(row['ratio']):.3f} {row['key']} / {row['peer']}"
    bad = [row for row in rows if row["status"] != "ok"]
    yield f"{len(timed)} pairs timed, {len(bad)} not"
    yield from (f"       {row['key']} / {row['peer']}: {row['status']} {row['reason']}" for row in bad[:12])


# --- pairs


def fault(row: Row, error: Exception) -> Row:
    """The row of a pair that could not be timed."""
    text = str(error).strip().splitlines()
    status = "unsupported" if isinstance(error, NotImplementedError) else "error"
    return row | {"status": status, "reason": f"{type(error).__name__}: {text[0] if text else ''}"[:200]}


class Bench:
    """Times pairs on one device."""

    def __init__(self, table: Path | None) -> None:
        import torch

        from flopcast.kernels import matmul_table
        from flopcast.microbench.timing.cuda_timer import CudaTimer
        from flopcast.microbench.timing.policy import QUICK

        self.torch: Any = torch
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.timer = CudaTimer(self.device, replace(QUICK, warm_up_seconds=1.0))
        self.facts = torch.cuda.get_device_properties(self.device)
        self.capability = (self.facts.major, self.facts.minor)
        self.given = None if table is None else matmul_table.read(table)

    def matmul_config(self, shape: Any) -> Any:
        from flopcast.kernels import matmul, matmul_table

        tma = all(extent % 8 == 0 for extent in (shape.m, shape.n, shape.k)) and self.capability[0] == 9
        sm_count = self.facts.multi_processor_count
        if self.given is None:
            return matmul.config_for(shape, sm_count, self.capability, tma=tma, device=self.facts.name)
        return matmul_table.choose(shape, sm_count, self.capability, tma=tma, table=self.given)

    def matmul(self, shape: Any) -> list[Row]:
        """One row: Triton against cuBLAS."""
        from flopcast.kernels import matmul
        from flopcast.microbench.timing import faster_product

        config = self.matmul_config(shape)
        base: Row = {
            "kernel": "matmul", "key": shape.key, "layout": shape.layout, "m": shape.m, "n": shape.n, "k": shape.k,
            "peer": "cublas", "flops": shape.flops, "bytes": shape.bytes, "config": config.key,
        }  # fmt: skip
        try:
            operands = faster_product.operands_of(shape, self.device)
            wrong_by = faster_product.errors(shape, operands, config)
            base |= {"peer_error": wrong_by["torch"], "error": wrong_by["triton"], "tolerance": matmul.tolerance(shape)}
            if base["error"] > base["tolerance"]:
                return [base | {"status": "incorrect"}]
            found = faster_product.timed(self.timer, shape, operands, ROUNDS, config)
        except Exception as error:
            return [fault(base, error)]
        return [self.row(base, found["triton"], found["torch"])]

    def row(self, base: Row, ours: Any, peer: Any) -> Row:
        return base | {
            "seconds": ours.seconds, "peer_seconds": peer.seconds, "ratio": peer.seconds / ours.seconds,
            "flops_per_second": base["flops"] / ours.seconds, "peer_flops_per_second": base["flops"] / peer.seconds,
            "readings": len(ours.readings), "clock_mhz": self.timer.read().clock_mhz, "status": "ok",
        }  # fmt: skip

    def attention(self, shape: Any) -> list[Row]:
        """A row a peer, all read in turn."""
        from flopcast.kernels import attention
        from flopcast.microbench.timing.interleave import calls_in_graph, interleaved, operand_sets

        base: Row = {
            "kernel": "attention", "key": shape.key, "m": shape.seq, "n": shape.heads, "k": shape.head_dim,
            "flops": shape.flops, "bytes": shape.bytes,
        }  # fmt: skip
        rows: dict[str, Row] = {peer: base | {"peer": peer} for peer in ATTENTION_PEERS}
        backends = ("triton", *ATTENTION_PEERS)
        sound: dict[str, float] = {}
        try:
            operands = attention.operands(shape, self.device)
            ref = attention.reference(operands, shape)
        except Exception as raised:
            return [fault(row, raised) for row in rows.values()]
        for backend in backends:
            try:
                out = attention.prepare(shape, backend, operands)()
                error, tolerance = attention.check(out, ref, operands, shape)
                if error <= tolerance:
                    sound[backend] = error
                else:
                    reason = f"{backend}: error {error:.2e}, admitted {tolerance:.2e}"
                    for peer in rows if backend == "triton" else (backend,):
                        rows[peer] |= {"status": "incorrect", "reason": reason}
            except Exception as caught:
                for peer in rows if backend == "triton" else (backend,):
                    rows[peer] = fault(rows[peer], caught)
        del ref
        peers = [peer for peer in ATTENTION_PEERS if peer in sound]
        if "triton" not in sound or not peers:
            return list(rows.values())

        def prepared(backend: str) -> Callable[[Any], Any]:
            return lambda x: attention.prepare(shape, backend, x)

        try:
            count = calls_in_graph(max(shape.flops / 3e14, 1e-5))
            sets = operand_sets(operands, self.timer.cache_bytes, count)
            ways = {backend: prepared(backend) for backend in ("triton", *peers)}
            found = interleaved(self.timer, ways, sets, count, ROUNDS)
        except Exception as raised:
            return [fault(row, raised) for row in rows.values()]
        for peer in peers:
            rows[peer] = self.row(rows[peer], found["triton"], found[peer]) | {
                "error": sound["triton"],
                "peer_error": sound[peer],
            }
        return list(rows.values())


def matmul_shapes(multiples: Sequence[int] = (), count: int = 0, seed: int = 0) -> list[Any]:
    """The grid that is tuned; or `count` random shapes of each of these multiples."""
    from flopcast.microbench.tuning.shapes import drawn, grid

    return [shape for x in multiples for shape in drawn(x, count, seed)] or list(grid())


def attention_shapes() -> list[Any]:
    from flopcast.kernels.shapes import Attention

    return [
        Attention(
            batch=4 if seq <= 4096 else 16384 // seq, heads=16, kv_heads=8, seq=seq, head_dim=head_dim,
            direction=direction,
        )
        for seq in SEQUENCES
        for head_dim in (128, 64)
        for direction in ("fwd", "bwd")
    ]  # fmt: skip


def compile_ahead(configs: Iterable[tuple[Any, str]], path: Path, deadline: float) -> None:
    """Compiles and checks the kernels of (configuration, layout) in as many processes as half of the cores, so that no
    pair waits for the compiler; a row for each is appended to a record."""
    from flopcast.microbench.tuning.check import check_all, kernel_of

    kernels = dict.fromkeys((kernel_of(config), layout) for config, layout in configs)
    workers = max(1, (os.cpu_count() or 2) // 2 - 2)
    check_all(list(kernels), path, workers, deadline, lambda text: print(text, file=sys.stderr, flush=True))


def run_pairs(kind: str, bench: Bench, path: Path, deadline: float, shapes: Sequence[Any]) -> bool:
    """Whether all pairs of a kind are done; those that the file holds are not done again."""
    torch = bench.torch
    done = {row["key"] for row in read_rows(path) if row["status"] == "ok"}
    shapes = [shape for shape in shapes if shape.key not in done]
    random.Random(1).shuffle(shapes)
    if kind == "matmul":
        compile_ahead(((bench.matmul_config(x), x.layout) for x in shapes), path.with_name("checks.jsonl"), deadline)
    start = time.monotonic()
    with torch.cuda.stream(bench.timer.stream):
        bench.timer.warm_up()
        for number, shape in enumerate(shapes, start=1):
            if time.monotonic() > deadline:
                print(f"{kind}: {len(shapes) - number + 1} shapes are left, the budget is used up", file=sys.stderr)
                return False
            append(path, getattr(bench, kind)(shape))
            if number % 20 == 0:
                torch.cuda.empty_cache()
                print(f"{kind}: {number} of {len(shapes)}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return True


def run_picks(path: Path, deadline: float, shapes: Sequence[Any]) -> None:
    """Writes what `flopcast.patch(matmul="measured")` takes for each shape, and the milliseconds of the choice, in
    the order of `run_pairs` reversed."""
    from flopcast.microbench.timing.faster_product import measured_choice

    choose = measured_choice(lambda shape: "not timed")
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("key", "picked", "ms"))
        shapes = list(shapes)
        random.Random(1).shuffle(shapes)
        for shape in reversed(shapes):
            if time.monotonic() > deadline:
                break
            start = time.perf_counter()
            picked = choose(shape)
            writer.writerow((shape.key, picked, round((time.perf_counter() - start) * 1e3, 1)))
            file.flush()


def run_memory(out: Path, budget: float) -> None:
    """studies/kernels/memory.py in a process of its own; its rows are added to kernels.csv."""
    command = [sys.executable, "-m", "studies.kernels.memory", str(out), "--budget", str(budget)]
    subprocess.run(command, check=False)
    rows = []
    for row in read_rows(out / "memory_kernels.csv"):
        if row["backend"] == "triton":
            peers = (("copy", "copy_ratio"), ("eager", "eager_ratio"), ("compile", "compile_ratio"))
            one = {**row, "n": "", "readings": row["n"]}  # n: a dimension here, the count of readings there
            rows += [
                {**one, "peer": peer, "ratio": row[column], "peer_seconds": float(row[column]) * float(row["seconds"])}
                for peer, column in peers
                if row[column]
            ]
    append(out / "kernels.csv", rows)


# --- figure


def plot(rows: Sequence[Row], path: Path) -> None:
    """Ratios against FLOPs a call: matmul by layout, attention by peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row["status"] == "ok" and row["ratio"]]
    kinds = [kind for kind in ("matmul", "attention") if any(row["kernel"] == kind for row in timed)]
    figure, axes = plt.subplots(1, max(1, len(kinds)), figsize=(6.4 * max(1, len(kinds)), 4.4), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=False):
        series = "layout" if kind == "matmul" else "peer"
        for name in dict.fromkeys(row[series] for row in timed if row["kernel"] == kind):
            found = [row for row in timed if row["kernel"] == kind and row[series] == name]
            axis.scatter(
                [float(row["flops"]) for row in found],
                [float(row["ratio"]) for row in found],
                s=12,
                alpha=0.8,
                label=f"{name} ({geometric_mean([float(row['ratio']) for row in found]):.2f})",
            )
        axis.axhline(1.0, color="0.4", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("FLOPs a call")
        axis.set_ylabel("peer's time / ours")
        axis.set_title({"matmul": "Triton matmul against cuBLAS", "attention": "Triton attention against SDPA"}[kind])
        axis.legend(title="geometric mean", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}", file=sys.stderr)


def main() -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="matmul,attention", help="of matmul, attention, memory, picks")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--table", type=Path, help="a matmul table in place of the shipped one")
    parser.add_argument("--drawn", default="", help="multiples of which random products are drawn, e.g. 64,8")
    parser.add_argument("--count", type=int, default=150, help="random products of each multiple")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plot", action="store_true", help="draw OUT/kernels.png from OUT/kernels.csv and stop")
    arguments = parser.parse_args()
    wanted = [kind for kind in arguments.only.split(",") if kind]
    if unknown := set(wanted) - {"matmul", "attention", "memory", "picks"}:
        parser.error(f"--only {', '.join(sorted(unknown))}: valid are matmul, attention, memory, picks")
    path = arguments.out / "kernels.csv"
    if arguments.plot:
        if not path.is_file():
            parser.error(f"no {path}: run without --plot first")
        plot(read_rows(path), arguments.out / "kernels.png")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    multiples = [int(x) for x in arguments.drawn.split(",") if x]
    drawn = matmul_shapes(multiples, arguments.count, arguments.seed)
    if "picks" in wanted:
        run_picks(arguments.out / "picks.csv", start + arguments.budget, drawn)
    if set(wanted) & {"matmul", "attention"}:
        from flopcast.microbench.timing.device import describe, describe_stack

        bench = Bench(arguments.table)
        shapes = {"matmul": drawn, "attention": attention_shapes()}
        for kind in wanted:
            if kind in shapes:
                run_pairs(kind, bench, path, start + arguments.budget, shapes[kind])
        facts = {"device": describe(bench.device), "stack": describe_stack(), "seconds": time.monotonic() - start}
        (arguments.out / "kernels.json").write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
    if "memory" in wanted:
        run_memory(arguments.out, max(1.0, arguments.budget - (time.monotonic() - start)))
    rows = read_rows(path)
    for line in summarise(rows):
        print(line)
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s: {path}")
    return 1 if any(row["status"] == "incorrect" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
