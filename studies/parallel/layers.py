"""Measures when each layer of a step begins on the hosts and on the GPUs of its ranks.

    torchrun --nproc-per-node 2 -m studies.parallel.layers OUT             a step of each kind of layout, some minutes
    ... --device cpu                                                        on processors, over gloo, to try it
    python -m studies.parallel.layers OUT --keep                            puts what OUT holds into reports/parallel
    python -m studies.parallel.layers                                       prints a table of that file

Steps run in a row, as a user's do. A mark is set where a forward or a layer's forward begins, where the gradient of a
layer's output is there, and where the optimizer begins: the host's clock, and an event on the compute stream. All
clocks of a rank are set by a moment at which its GPU was idle, those of ranks by the host's monotonic clock, which
processes of one host share. How much later than the host the GPU comes to a mark tells whether the host is ahead there.
OUT gets NAME.rankN.json per step and rank, with the seconds of as many steps without marks.
"""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.ranks.measure import meet
from flopcast.microbench.recipe.compiling import forget
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.parallel_step import build_parallel, mesh_of
from flopcast.microbench.recipe.settings import Recipe
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table
from studies.parallel.record import group_of
from studies.parallel.steps import MODELS, Step

STEPS = (
    Step("qwen3-1.7b", "fsdp={n}", 4, 2048, accumulate=2),
    Step("gpt2", "zero2={n}", 16, 1024),
    Step("llama-3.2-1b", "tp={n}", 8, 2048),
    Step("qwen3-1.7b", "fsdp={n}", 8, 1024, finetune="last=4"),
    Step("qwen3-0.6b", "ddp={n}", 8, 1024, "muon"),
    Step("qwen3-0.6b", "cp={n},fsdp=1", 8, 2048),
    Step("qwen3-0.6b", "ddp={n}", 8, 1024),
    Step("qwen3-0.6b", "fsdp={n}", 8, 1024),
)
TINY = Step("w640-d6", "ddp={n}", 2, 64)
IN_A_ROW, FIRST = 8, 2  # steps in a row, and how many of them are not looked at
FILE = ROOT / "reports" / "parallel" / "layers.json.gz"

Row = tuple[str, float, float]  # a mark's name, when the host came to it, and the GPU


class Marks:
    """Marks of the steps of a rank, in the order in which they are set."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._found: list[tuple[str, float, Any]] = []
        self._zero: tuple[float, Any] = (0.0, None)

    def begin(self) -> None:
        """Sets the clocks: the GPU is idle."""
        self._found.clear()
        if self._is_cuda:
            torch.cuda.synchronize()
        self._zero = (time.perf_counter(), self._event())

    def _event(self) -> Any:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream())
        return event

    def set(self, name: str) -> None:
        self._found.append((name, time.perf_counter(), self._event()))

    def rows(self) -> list[Row]:
        """All marks; seconds are the host's monotonic clock's."""
        if self._is_cuda:
            torch.cuda.synchronize()
        start, zero = self._zero
        return [
            (name, round(at, 7), round(start + zero.elapsed_time(event) * 1e-3, 7) if event else round(at, 7))
            for name, at, event in self._found
        ]


@contextmanager
def marked(step: Any, marks: Marks) -> Iterator[None]:
    model = step.model
    inner = getattr(model, "module", model)
    layers = next(
        list(module) for name, module in inner.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.endswith(("layers", "h"))
    )  # fmt: skip

    def before(name: str) -> Any:
        return lambda *_: marks.set(name)

    def after(number: int) -> Any:
        def told(_module: Any, _args: Any, out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: marks.set(f"backward {number}"))

        return told

    hooks = [
        model.register_forward_pre_hook(before("forward")), model.register_forward_hook(before("loss")),
        *(optimizer.register_step_pre_hook(before("optimizer")) for optimizer in step.optimizers),
    ]  # fmt: skip
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(before(f"layer {number}")))
        hooks.append(layer.register_forward_hook(after(number)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_a_row(step: Any, marks: Marks | None) -> float:
    is_cuda = step.device_type == "cuda"
    meet(is_cuda)
    if marks is not None:
        marks.begin()
    start = time.perf_counter()
    for _ in range(IN_A_ROW):
        if marks is not None:
            marks.set("step")
        step.run()
    if marks is not None:
        marks.set("end")
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / IN_A_ROW


def measure(step: Step, device: str) -> dict[str, Any]:
    layout = Layout.parse(step.layout.format(n=dist.get_world_size()))
    forget(step.mode)
    torch.manual_seed(dist.get_rank() if layout.world == layout.data else 0)
    made = build_parallel(MODELS[step.model], layout, mesh_of(layout, device), device, Recipe(**step.settings))
    made.warm_up()
    gc.collect()
    with no_garbage_collection():
        plain = [in_a_row(made, None) for _ in range(2)]
        marks = Marks(device == "cuda")
        with marked(made, marks):
            in_a_row(made, marks)
            seconds = in_a_row(made, marks)
            rows = marks.rows()
    return {"plain": plain, "marked": seconds, "rows": rows}


def keep(folder: Path) -> None:
    found = {
        path.name.removesuffix(".json"): json.loads(path.read_text()) for path in sorted(folder.glob("*.rank*.json"))
    }
    FILE.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


def read() -> dict[str, list[list[Row]]]:
    """Returns the marks of each step's ranks."""
    found: dict[str, list[list[Row]]] = {}
    for name, one in json.loads(gzip.decompress(FILE.read_bytes())).items():
        found.setdefault(name.partition(".rank")[0], []).append([(mark, at, done) for mark, at, done in one["rows"]])
    return found


def spent(rows: Sequence[Row], phase: str) -> tuple[float, float, float]:
    """Returns seconds per layer of the host and of the GPU in a phase, "layer" or "backward", and the median by which
    the GPU comes later to the beginning of one."""
    starts = [number for number, row in enumerate(rows) if row[0] == "step"]
    pairs = [
        (one, next_one)
        for one, next_one in zip(rows[starts[FIRST] :], rows[starts[FIRST] + 1 :], strict=False)
        if one[0].startswith(phase) and next_one[0].startswith(phase) and one[0] != "layer 0"  # which waits for the GPU
    ]
    return (
        fmean(after[1] - before[1] for before, after in pairs), fmean(after[2] - before[2] for before, after in pairs),
        median(before[2] - before[1] for before, _ in pairs),
    )  # fmt: skip


def report() -> str:
    lines = []
    for name, ranks in read().items():
        for phase, said in (("layer", "forward"), ("backward", "backward")):
            found = [spent(rows, phase) for rows in ranks]
            lines.append([
                name, said, ", ".join(f"{host * 1e3:.2f}" for host, _, _ in found),
                ", ".join(f"{gpu * 1e3:.2f}" for _, gpu, _ in found),
                ", ".join(f"{late * 1e3:.1f}" for _, _, late in found),
            ])  # fmt: skip
    return table(["step", "phase", "ms a layer, hosts of the ranks", "GPUs", "GPU behind the host, ms"], lines)


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.out is None:
        print(report())
    elif options.keep:
        keep(options.out)
    else:
        measure_all(options.out, options.device)


def measure_all(out: Path, device: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with group_of(device):
        for step in STEPS if device == "cuda" else (TINY,):
            start = time.perf_counter()
            try:
                found = measure(step, device)
                (out / f"{step.name}.rank{dist.get_rank()}.json").write_text(json.dumps(found))
                told = f"{found['plain']}, marked {found['marked']:.4f}"
            except (RuntimeError, ValueError) as fault:
                told = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(f"{step.name}: {told}, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
