"""Which products inductor pads while it compiles a model 1,023 wide, by what it timed, and what the kernels then take.

    python -m studies.widths.pads OUT NAME                      in a process of its own
    python -m studies.widths.pads OUT NAME --mode compile-graphs
    python -m studies.widths.pads OUT NAME --gpt2               of GPT-2s of one layer, whose tokens are 50,257

The pass `pad_mm` times each product as it is and with rows of whole 16 bytes, and takes the faster by a tenth. It times
what the host launches: of the product one call, of its padded form up to three and six views. OUT/NAME.json gets one
process: `bare`, the host's microseconds for a product and for such a padded one when nothing else is done; `choices`,
what was timed, in microseconds; `device_seconds` and `launches` of a profiled step. `pads.json` in reports has four on
H100s and one on an H200; `pads-gpt2.json` what was timed for the gradient of GPT-2's tokens' weights.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._inductor.fx_passes import pad_mm

from flopcast.microbench.recipe.compiling import compile_model
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.microbench.steps import measure
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.steps.gpu_alone import first_steps
from flopcast.roofline.stream.model.models import load_config
from studies.command import parser_of
from studies.compiled.validate import MODES, plans_of

CASE = "w1023-d4"
CALLS, ROUNDS = 100, 7
# (width, heads, batch, tokens a sequence)
GPT2S = (
    (768, 12, 8, 256), (768, 12, 1, 1024), (768, 12, 8, 1024), (768, 12, 11, 256), (768, 12, 39, 256),
    (768, 12, 16, 1024), (1024, 16, 4, 1024), (512, 8, 8, 512), (768, 12, 4, 1024), (1280, 20, 4, 512),
)  # fmt: skip


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the answer")
    parser.add_argument("name", help="of this process")
    parser.add_argument("--mode", default=MODES[0], choices=MODES)
    parser.add_argument("--gpt2", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.gpt2:
        timed = [one for sizes in GPT2S for one in of_gpt2(*sizes)]
        (given.out / f"{given.name}.json").write_text(json.dumps(timed, indent=1) + "\n")
        return
    (plan,) = plans_of(given.mode, CASE)
    bare = bare_microseconds()
    choices = told_choices()
    step = build_plan(plan, torch.device("cuda"))
    first_steps(step)
    kernels = [measure.profile_kernels(step) for _ in range(2)][-1]
    found = {
        "name": given.name, "mode": given.mode, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "bare": bare, "choices": choices,
        "device_seconds": sum(kernel.seconds for kernel in kernels), "launches": len(kernels),
    }  # fmt: skip
    (given.out / f"{given.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    padded = sum(one["padded"] for one in choices)
    print(f"{given.name}: {padded} of {len(choices)} padded, {found['device_seconds'] * 1e3:.2f} ms; bare {bare}")


def of_gpt2(width: int, heads: int, batch: int, seq: int) -> list[dict[str, Any]]:
    """What was timed for the products of 50,257 tokens of a GPT-2 of one layer."""
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.reset()
    choices = told_choices()
    config = {**load_config("gpt2"), "n_layer": 1, "n_embd": width, "n_head": heads}
    step = build(config, "cuda", Recipe(batch=batch, seq=seq, optimizer="adamw-fused", mode="compile"))
    compile_model(step, "compile")
    first_steps(step)
    return choices


def bare_microseconds() -> dict[str, float]:
    """What a tiny product costs the host, and one whose operands get zeros written into their rims and whose result is
    cut."""
    small = torch.randn(8, 8, device="cuda", dtype=torch.bfloat16)

    def padded() -> None:
        for _ in range(2):
            small[-1:, -1:].fill_(0)
        torch.ops.aten.mm(small, small)[:, :-1]

    return {"product": _each(lambda: torch.ops.aten.mm(small, small)), "padded": _each(padded)}


def _each(call: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - started) / CALLS * 1e6)
    return round(median(found), 1)


def told_choices() -> list[dict[str, Any]]:
    """Has what inductor times from here on put into the list that is returned."""
    found: list[dict[str, Any]] = []
    own = pad_mm.is_padded_faster

    def told(key: str, ori_time: float, pad_time: float) -> bool:
        answer = own(key, ori_time, pad_time)
        found.append(choice_of(key, ori_time, pad_time, answer))
        return answer

    pad_mm.is_padded_faster = told
    return found


def choice_of(key: str, as_it_is: float, padded: float, answer: bool) -> dict[str, Any]:
    """A choice by the key that inductor keeps it under, and milliseconds as it is and padded."""
    (m, k), (_, n) = (
        [int(size) for size in sizes.split(",")] for sizes in re.findall(r"torch\.Size\(\[([\d, ]+)\]\)", key)[:2]
    )
    return {
        "m": m, "k": k, "n": n, "as_it_is_us": round(as_it_is * 1e3, 2), "padded_us": round(padded * 1e3, 2),
        "padded": bool(answer),
    }  # fmt: skip


if __name__ == "__main__":
    main()
