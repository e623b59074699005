"""Measures the loads of the experts in real training steps, and the fp32 products that they make.

    python -m studies.experts.measure OUT

Needs a GPU. Routers are as transformers makes them, untrained and without an auxiliary loss, and learn during the
steps, all of the same tokens. Each case's step is repeated, and the last repetition is profiled: OUT/experts.jsonl.gz
gets a row per case, of the fields of `Measured`. A case that is there is not run again.
"""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build
from flopcast.roofline.stream.model.models import Config, load_config, with_depth
from flopcast.roofline.validation.step_plans import FEW_EXPERTS
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "experts"
FILE = "experts.jsonl.gz"
STEPS = 40  # before the one that is profiled: about as many as `flopcast validate` runs before it profiles a step

_WIDE = load_config("qwen3-moe")
_MANY = _WIDE | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "num_hidden_layers": 4}
_LARGE = _WIDE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048, "num_hidden_layers": 6}


@dataclass(frozen=True)
class Case:
    """A step of fp32 weights under autocast in bf16, with fused AdamW. `seen`: whether the shape of loads that
    `--imbalance` assumes was chosen by a run of it."""

    name: str
    config: Config
    batch: int
    seq: int
    seen: bool = False


CASES = (
    Case("qwen3-moe", _WIDE, 8, 1024, seen=True),
    Case("qwen3-moe", _WIDE, 8, 512, seen=True),
    Case("qwen3-moe-d4", with_depth(_WIDE, 4), 8, 1024, seen=True),
    Case("qwen3-moe-d4", with_depth(_WIDE, 4), 4, 128, seen=True),
    Case("moe-w768-d6-e16", FEW_EXPERTS, 8, 1024, seen=True),
    Case("moe-w768-d6-e16", FEW_EXPERTS, 4, 256, seen=True),
    Case("qwen3-moe-d8", with_depth(_WIDE, 8), 4, 1024),
    Case("moe-d4-e64-top8", _MANY, 4, 512),
    Case("moe-d4-e64-top8", _MANY, 8, 1024),
    Case("moe-d6-e8-top2", _LARGE, 4, 256),
    Case("moe-d6-e8-top2", _LARGE, 8, 512),
)


@dataclass(frozen=True)
class Product:
    """One call of `aten::mm` that multiplies m x k by k x n in fp32, and its kernels."""

    m: int
    n: int
    k: int
    kernels: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The profiled step of a case. `loads`: tokens of each expert, by layer; `device_seconds`: sum of all kernels."""

    name: str
    batch: int
    seq: int
    gpu: str
    torch: str
    loads: list[list[int]]
    products: list[Product]
    device_seconds: float


def measured(case: Case) -> Measured:
    from torch.profiler import ProfilerActivity, profile

    step = build(case.config, "cuda", Recipe(batch=case.batch, seq=case.seq, optimizer="adamw-fused"))
    for _ in range(STEPS):
        step.run()
    torch.cuda.synchronize()
    watched = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with (
        loads_of(step, case.config["num_experts"]) as loads,
        profile(activities=watched, record_shapes=True) as profiler,
    ):
        step.run()
        torch.cuda.synchronize()
    products, device = [], 0.0
    for event in profiler.events():
        device += sum(kernel.duration for kernel in event.kernels)
        names = " ".join(kernel.name for kernel in event.kernels)
        if event.name == "aten::mm" and event.kernels and "bf16" not in names and "nvjet" not in names:
            (m, k), (_, n) = event.input_shapes[:2]
            microseconds = sum(kernel.duration for kernel in event.kernels)
            products.append(Product(m, n, k, len(event.kernels), microseconds * 1e-6))
    return Measured(
        case.name, case.batch, case.seq, torch.cuda.get_device_name(), torch.__version__,
        [layer.tolist() for layer in loads], products, device * 1e-6,
    )  # fmt: skip


@contextmanager
def loads_of(step: TrainingStep, experts: int) -> Iterator[list[torch.Tensor]]:
    """The tokens of each expert, a tensor per layer, of the forward that runs inside."""
    found: list[torch.Tensor] = []

    def count(_module: object, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        chosen = next(output for output in outputs if not output.is_floating_point())
        found.append(torch.bincount(chosen.reshape(-1), minlength=experts))

    hooks = [
        module.register_forward_hook(count) for name, module in step.model.named_modules() if name.endswith("mlp.gate")
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def save(rows: Iterable[Measured], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    (folder / FILE).write_bytes(gzip.compress(lines.encode(), mtime=0))


def load(folder: Path = FOLDER) -> list[Measured]:
    if not (folder / FILE).is_file():
        return []
    rows = map(json.loads, gzip.decompress((folder / FILE).read_bytes()).splitlines())
    return [Measured(**{**row, "products": [Product(**one) for one in row["products"]]}) for row in rows]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    rows = load(out)
    known = {(row.name, row.batch, row.seq) for row in rows}
    for case in CASES:
        if (case.name, case.batch, case.seq) in known:
            continue
        rows.append(measured(case))
        save(rows, out)
        print(f"{case.name} {case.batch} x {case.seq}: {len(rows[-1].products)} products", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
