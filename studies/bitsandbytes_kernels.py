"""Measures the kernels of bitsandbytes that QLoRA and AdamW in 8 bits launch, as rows that `flopcast fit` reads.

    python -m studies.bitsandbytes_kernels OUT [--budget S]

Shapes are the calls that a trace has (`recipe.bitsandbytes_calls`), of sizes of which no step of `validate` has any but
by chance; "holdout" has sizes of its own. Each result is checked against plain torch first. The library launches its
optimizer on the default stream, whichever is current, which no CUDA graph may capture: so all runs there, and times
are those of CUDA's profiler, cold (after a flush of the L2) and hot.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopcast.kernels.shapes import Call, Operand
from flopcast.microbench.recipe.bitsandbytes_calls import BETAS, BLOCK, EPSILON, STATE_BLOCK, WEIGHT_DECAY
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.sweep.cases import Case, case_row
from flopcast.microbench.timing.cupti import record, split_at_markers, summarise
from flopcast.microbench.timing.device import describe, pick_device
from flopcast.microbench.timing.telemetry import telemetry
from studies.command import parser_of

SUITE = "bitsandbytes"
REPEATS = 7
BATCH = 8  # cases of one profiler session
LEARNING_RATE = 1e-3
TOLERANCE = {"dequantize_blockwise": 1e-6, "dequantize_4bit": 8e-3, "optimizer_update_8bit_blockwise": 2e-2,
             "optimizer_update_32bit": 1e-3}  # fmt: skip
# By role (results, inputs) of layers whose weights are unpacked, and numbers of parameters that an update has.
LAYERS = {
    "fit": [(256, 512), (512, 768), (768, 768), (512, 1536), (1280, 1280), (1536, 2304), (2304, 2304), (2304, 4096),
            (3072, 3072), (3072, 5120), (4608, 4608), (5120, 7168), (6144, 8192), (8192, 10240), (10240, 14336)],
    "holdout": [(384, 640), (896, 1152), (1792, 1792), (2688, 3584), (3584, 7680), (7168, 9216)],
}  # fmt: skip
NUMELS = {
    "fit": [4_096, 16_384, 49_152, 131_072, 393_216, 786_432, 1_572_864, 3_538_944, 7_077_888, 12_582_912, 25_165_824,
            50_331_648, 100_663_296, 201_326_592, 402_653_184],
    "holdout": [8_192, 98_304, 589_824, 2_359_296, 9_437_184, 37_748_736, 150_994_944],
}  # fmt: skip
SMALL = {"fit": [64, 128, 256, 1024, 2048, 3072], "holdout": [96, 512, 2560]}
HOT_BYTES = 64 * 1024**2


def main() -> None:
    """Measures what OUT lacks."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing is begun")
    asked = parser.parse_args()
    importlib.import_module("bitsandbytes")  # before anything is begun
    device, end = pick_device(None), time.monotonic() + asked.budget
    with Recorder(asked.out, describe(device)) as recorder:
        todo = [case for case in cases() if not recorder.is_done(case.shape.key, case.backend, case.cache)]
        random.Random(0).shuffle(todo)
        while todo and time.monotonic() < end:
            batch, todo = todo[:BATCH], todo[BATCH:]
            measure(batch, recorder, device)
            print(len(todo), "left", flush=True)


def cases() -> list[Case]:
    """Every call, cold and, where its operands stay in an L2, hot."""
    found = []
    for role in LAYERS:
        for shape in calls(role):
            found.append(Case(shape=shape, role=role))
            if shape.bytes <= HOT_BYTES:
                found.append(Case(shape=shape, role=role, cache="hot"))
    return found


def calls(role: str) -> Iterator[Call]:
    """The calls of one role."""
    for results, inputs in LAYERS[role]:
        numel = results * inputs
        blocks = numel // BLOCK
        outer = -(-blocks // STATE_BLOCK)
        yield Call(
            "bnb.dequantize_4bit.default", (_operand("uint8", numel // 2, 1), _operand("fp32", blocks)),
            (_operand("bf16", results, inputs),),
            json.dumps([{"t": 0}, {"t": 1}, BLOCK, "nf4", [results, inputs], {"d": "bf16"}], separators=(",", ":")),
        )  # fmt: skip
        yield Call(
            "bnb.dequantize_blockwise.default",
            (_operand("uint8", blocks), _operand("fp32", outer), _operand("fp32", 256)), (_operand("fp32", blocks),),
            json.dumps([{"t": 0}, {"t": 1}, {"t": 2}, STATE_BLOCK, {"d": "fp32"}], separators=(",", ":")),
        )  # fmt: skip
    for dtype in ("fp32", "bf16"):
        for numel in NUMELS[role]:
            yield _update("optimizer_update_8bit_blockwise", dtype, numel)
        for numel in SMALL[role]:
            yield _update("optimizer_update_32bit", dtype, numel)


def _update(name: str, dtype: str, numel: int) -> Call:
    is_small = name.endswith("32bit")
    state = _operand("fp32" if is_small else "uint8", numel)
    numbers: list[Any] = [*BETAS, EPSILON, 1, LEARNING_RATE, WEIGHT_DECAY]
    operands = [_operand(dtype, numel), _operand(dtype, numel), state, state]
    arguments: list[Any] = ["adam", *({"t": i} for i in range(4)), *numbers]
    if not is_small:
        operands += [_operand("fp32", 256)] * 2 + [_operand("fp32", -(-numel // STATE_BLOCK))] * 2
        arguments += [{"t": i} for i in range(4, 8)]
    written = (1, 2, 3) if is_small else (1, 2, 3, 6, 7)
    return Call(f"bnb.{name}.default", tuple(operands), (), json.dumps(arguments, separators=(",", ":")), "{}", written)


def _operand(dtype: str, *sizes: int) -> Operand:
    strides = tuple(_product(sizes[i + 1 :]) for i in range(len(sizes)))
    return Operand(sizes, strides, dtype)


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


# --- running one


def prepared(shape: Call, device: torch.device) -> tuple[Callable[[], Any], Callable[[], float]]:
    """(the library's call on packed random numbers, the relative error of its first result)."""
    torch.manual_seed(0)
    name = shape.op.split(".")[1]
    if name == "dequantize_4bit":
        return _dequantise_4(shape, device)
    if name == "dequantize_blockwise":
        return _dequantise_8(shape, device)
    return _step(shape, device, is_small=name.endswith("32bit"))


def _dequantise_4(shape: Call, device: torch.device) -> tuple[Callable[[], Any], Callable[[], float]]:
    calls_: Any = torch.ops.bitsandbytes
    weights = torch.randn(shape.outputs[0].shape, device=device).to(torch.bfloat16)
    packed, absmax = calls_.quantize_4bit(weights, BLOCK, "nf4", torch.uint8)

    def run() -> Any:
        return calls_.dequantize_4bit(packed, absmax, BLOCK, "nf4", list(weights.shape), torch.bfloat16)

    def error() -> float:
        functional: Any = importlib.import_module("bitsandbytes.functional")
        values = functional.get_4bit_type("nf4", device=device)
        both = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten().long()
        wanted = (values[both].view(-1, BLOCK) * absmax.view(-1, 1)).view(weights.shape)
        return _off(run(), wanted)

    return run, error


def _dequantise_8(shape: Call, device: torch.device) -> tuple[Callable[[], Any], Callable[[], float]]:
    calls_: Any = torch.ops.bitsandbytes
    blocks = shape.inputs[0].numel
    numbers = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device)
    absmax = torch.rand(shape.inputs[1].numel, device=device) + 0.5
    code = torch.linspace(-1, 1, 256, device=device)

    def run() -> Any:
        return calls_.dequantize_blockwise(numbers, absmax, code, STATE_BLOCK, torch.float32)

    def error() -> float:
        return _off(run(), code[numbers.long()] * absmax.repeat_interleave(STATE_BLOCK)[:blocks])

    return run, error


def _step(shape: Call, device: torch.device, is_small: bool) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The update as the library's own optimizer makes it, of states that a first step has filled."""
    optim: Any = importlib.import_module("bitsandbytes.optim")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.inputs[0].dtype]
    start = torch.randn(shape.inputs[0].shape, device=device)
    parameter = torch.nn.Parameter(start.to(dtype))
    gradient = parameter.grad = torch.randn(parameter.shape, device=device).to(dtype)
    optimizer = optim.AdamW8bit([parameter], lr=LEARNING_RATE)

    def error() -> float:
        """Of how far the first step moves the parameters: by the learning rate, along the gradient's sign."""
        before = parameter.detach().double()
        optimizer.step()
        moved = before * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * gradient.double().sign()
        far = (parameter.detach().double() - moved).norm() / (moved - before).norm()
        return float(far) if dtype == torch.float32 else _off(parameter.detach(), moved)

    def run() -> Any:
        optimizer.update_step(optimizer.param_groups[0], parameter, 0, 0)

    return run, error


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def measure(batch: Sequence[Case], recorder: Recorder, device: torch.device) -> None:
    """Writes a row for every case of a batch, of one profiler session."""
    ready: list[tuple[Case, Callable[[], Any], float]] = []
    for case in batch:
        name = case.shape.op.split(".")[1]  # type: ignore[union-attr]
        tolerance = TOLERANCE[name]
        try:
            run, error = prepared(case.shape, device)  # type: ignore[arg-type]
            off = error()
            fields: dict[str, Any] = {"relative_error": off, "tolerance": tolerance}
            if not off <= tolerance:
                fields |= {"status": "incorrect", "reason": f"relative error {off:.3g} is above {tolerance:.3g}"}
                recorder.append(case_row(case, SUITE, fields))
                continue
            run()
            ready.append((case, run, off))
        except Exception as fault:
            reason = f"{type(fault).__name__}: {fault}"[:300]
            recorder.append(case_row(case, SUITE, {"status": "error", "reason": reason}))
    if device.type != "cuda" or not ready:
        return
    buffer = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    mark: Any = torch.cuda._sleep

    def everything() -> None:
        for case, run, _ in ready:
            run()
            for _ in range(REPEATS):
                if case.cache == "cold":
                    buffer.zero_()
                mark(1)
                run()
                mark(1)
            torch.cuda.synchronize(device)

    reading = telemetry(device)
    groups = split_at_markers(record(everything, device), len(ready) * REPEATS)
    for i, (case, _, off) in enumerate(ready):
        fields = {"relative_error": off, "tolerance": TOLERANCE[case.shape.op.split(".")[1]]}  # type: ignore[union-attr]
        mine = groups[i * REPEATS : (i + 1) * REPEATS] if groups else []
        if not mine or not all(mine):
            recorder.append(case_row(case, SUITE, {**fields, "status": "error", "reason": "the profiler lost records"}))
            continue
        times = summarise(mine)
        samples = [sum(event.duration_ns for event in call) * 1e-9 for call in mine]
        fields |= {
            "seconds": statistics.median(samples), "kernel_seconds": times.seconds, "samples": samples,
            "n": len(samples), "timer": "cupti", "kernels": [list(kernel) for kernel in times.kernels],
            **reading().as_row(),
        }  # fmt: skip
        recorder.append(case_row(case, SUITE, fields))


if __name__ == "__main__":
    main()
