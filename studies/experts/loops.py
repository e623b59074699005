"""Records what torch calls within a grouped product that it runs group by group, of a real step on a GPU.

    python -m studies.experts.loops OUT            writes OUT/loops.json

A step of four layers of Qwen3-MoE, 6 x 256 under autocast and 6 x 320 in fp32, is profiled with its calls on the host.
Of each grouped product loops.json has the thread, which tells its phase, the calls within it by name, and the kernels
that were launched; no seconds, since a profiler slows the host down.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.roofline.stream.model.models import load_config, with_depth
from studies.command import parser_of
from studies.imports import ROOT

FILE = ROOT / "reports" / "nvidia-h200" / "experts" / "loops.json"
GROUPED = "aten::_grouped_mm"
STEPS = (("autocast-bf16", 256), ("fp32", 320))
DEPTH, WARM = 4, 6


def traced_events(precision: str, seq: int) -> list[dict[str, Any]]:
    """The events of a profiled step, as torch's profiler exports them."""
    step = build(
        with_depth(load_config("qwen3-moe"), DEPTH), "cuda", Recipe(batch=6, seq=seq, precision=precision)
    )  # fmt: skip
    for _ in range(WARM):
        step.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step.run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        return events_of(path)


def events_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    events = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)["traceEvents"]
    return [one for one in events if one.get("ph") == "X"]


def loops(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What lies within each grouped product, in order: {"thread", "calls": {name: count}, "launches"}. Autograd's
    thread runs the backward's; `thread` numbers them as they come."""
    events = sorted((one for one in events if "ts" in one), key=lambda one: float(one["ts"]))
    products = [one for one in events if one["name"] == GROUPED]
    threads = list(dict.fromkeys(one["tid"] for one in products))
    found = []
    for product in products:
        start, end = product["ts"], product["ts"] + product["dur"]
        inside = [
            one
            for one in events
            if one["tid"] == product["tid"] and start < one["ts"] and one["ts"] + one["dur"] <= end
        ]
        calls = Counter(one["name"] for one in inside if one.get("cat") == "cpu_op")
        launches = sum("LaunchKernel" in one["name"] for one in inside)
        found.append({"thread": threads.index(product["tid"]), "calls": dict(sorted(calls.items())),
                      "launches": launches})  # fmt: skip
    return found


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {precision: loops(traced_events(precision, seq)) for precision, seq in STEPS}
    (options.out / FILE.name).write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
