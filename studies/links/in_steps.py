"""Judges the shipped link by collectives of real steps, to which nothing of it was fitted.

    python -m studies.links.in_steps STEPS --out reports/nvidia-h200/links/in_steps.csv

STEPS is a folder of `studies.parallel.steps`. Taken are tensor parallel steps' all-reduces of activations and of their
gradients, beside which nothing runs, and of FSDP's steps the all-gathers and reduce-scatters of layers beside which
nothing ran on either rank. A collective lasts from when the later rank begins: the shorter of both kernels.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from flopcast.microbench.ranks.measure import Kernel
from flopcast.roofline.gpu.links.choice import Kind
from flopcast.roofline.gpu.links.library import find_interconnect
from studies.command import parser_of
from studies.parallel.steps import Measured, load

_NAMES: dict[str, Kind] = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
}  # fmt: skip
SHORT = 20e-6  # all-reduces of norms' gradients, and of scalars, are shorter

LEAST_LAYERS = 3  # of fewer the embedding's collectives are as many as theirs


class Found(NamedTuple):
    """Collectives of one size in one step: how many, and their median seconds."""

    step: str
    kind: Kind
    dtype: str
    bytes: int
    times: int
    seconds: float


def layer_parameters(config: dict[str, Any]) -> int:
    """Of a layer of Qwen3's."""
    width, head = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    return int(2 * width * head * heads + 3 * width * config["intermediate_size"] + 2 * width + 2 * head)


def found_in(ranks: list[Measured]) -> Iterator[Found]:
    """The collectives of a step that nothing ran beside."""
    step, config = ranks[0].step, dict(ranks[0].config)
    layout = step["layout"].partition("=")[0]
    tokens = step["batch"] * step["seq"]
    seconds: dict[tuple[Kind, str], list[float]] = defaultdict(list)
    for kernels in zip(*(rank.kernels for rank in ranks), strict=True):
        sent = [[kernel for kernel in one if "ncclDevKernel" in kernel.name] for one in kernels]
        for pair in zip(*sent, strict=True):
            alone = all(not _beside(kernel, one) for kernel, one in zip(pair, kernels, strict=True))
            shortest = min(kernel.seconds for kernel in pair)
            name = re.match(r"ncclDevKernel_([A-Za-z]+)(?:_Sum_(\w+?))?_RING", pair[0].name)
            kind = _NAMES.get(name[1]) if name else None
            if kind and name and alone and shortest > SHORT:
                seconds[kind, "fp32" if name[2] == "f32" else "bf16"].append(shortest)
    for (kind, dtype), times in sorted(seconds.items()):
        size = 4 if dtype == "fp32" else 2
        if layout == "tp" and kind == "all_reduce":
            whole = tokens * config["hidden_size"] * size
        elif layout in ("fsdp", "zero2") and kind != "all_reduce" and _is_qwen3(config):
            whole = layer_parameters(config) * size
        else:
            continue
        of_layers = [one for one in times if one < 3 * median(times)]  # not the embedding's
        if len(of_layers) < config["num_hidden_layers"]:
            continue
        yield Found(f"{step['model']} {layout} {step['batch']} x {step['seq']}", kind, dtype, whole, len(of_layers),
                    median(of_layers))  # fmt: skip


def _is_qwen3(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "qwen3" and config["num_hidden_layers"] >= LEAST_LAYERS


def _beside(kernel: Kernel, kernels: list[Kernel]) -> bool:
    """Whether anything else ran in the last tenth of a millisecond of a collective, when both ranks had begun."""
    end = kernel.start + kernel.seconds
    start = end - min(kernel.seconds, 1e-4)
    return any(one is not kernel and one.start < end and one.start + one.seconds > start for one in kernels)


def steps_of(folder: Path) -> list[list[Measured]]:
    """Steps with kernels, of each its ranks."""
    paths = sorted(folder.glob("*.rank0.json.gz"))
    ranks = [[load(path), load(Path(str(path).replace(".rank0.", ".rank1.")))] for path in paths]
    return [two for two in ranks if all(one.kernels for one in two)]


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = options_of(parser_of(__spec__, __doc__))
    link = find_interconnect("nvidia-h200")
    found = [one for ranks in steps_of(options.folder) for one in found_in(ranks)]
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Found._fields)
        writer.writerows([*one[:-1], f"{one.seconds:.4e}"] for one in found)
    for one in found:
        time = link.time(one.kind, one.bytes, 2, dtype=one.dtype)
        print(f"{one.step}: {one.kind} {one.dtype} {one.bytes / 2**20:.1f} MiB, {one.times} of "
              f"{one.seconds * 1e6:.1f} us, forecast {time.seconds / one.seconds - 1:+.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
