"""Golden files: what a real training step launched on a GPU, condensed to what a trace must reproduce.

    python tests/roofline/golden.py

records them on a CUDA machine into tests/data (an H200 with torch 2.11 made those committed).
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopcast.kernels.shapes import Operand
from flopcast.roofline.models import make_config
from flopcast.roofline.stream import Op, Stream

DATA = Path(__file__).resolve().parent.parent / "data"

_ODD = make_config(width=1024, depth=3, heads=8, tied=False)
STEPS: dict[str, dict[str, Any]] = {
    "w256d4": {"config": make_config(width=256, depth=4), "batch": 4, "seq": 256, "optimizer": "adamw"},
    "w1024d3": {"config": make_config(width=1024, depth=3, heads=16), "batch": 4, "seq": 256, "optimizer": "adamw"},
    "w1024d3_8x1024f": {"config": make_config(width=1024, depth=3, heads=16), "batch": 8, "seq": 1024,
                        "optimizer": "adamw-fused"},
    "w1024d3u_2x2048": {"config": _ODD, "batch": 2, "seq": 2048, "optimizer": "adamw"},
    "q06b": {"config": make_config(width=1024, depth=28, heads=16), "batch": 4, "seq": 256, "optimizer": "adamw"},
}  # fmt: skip


def operand_key(operand: Operand) -> str:
    """`Operand.key` without the strides of dimensions of size 1, which mean nothing and differ by backend."""
    stride = tuple(0 if size == 1 else step for size, step in zip(operand.shape, operand.stride, strict=True))
    return Operand(operand.shape, stride, operand.dtype).key


def ops_of(stream: Stream) -> Counter[str]:
    """The multiset of ops, each as one line: phase, kind, call, arguments, operands, what it returns and writes.

    Attention is called "attention" whichever backend runs it, and only the operands that all backends have count.
    """
    return Counter(_line(stream, op) for op in stream.ops)


def _line(stream: Stream, op: Op) -> str:
    inputs = list(dict.fromkeys(op.inputs))  # a tensor given twice is one operand
    outputs = [operand_key(stream.tensors[i].operand) for i in op.outputs]
    name, arguments = op.name, _arguments(op, inputs)
    if "attention" in name:
        is_backward = "backward" in name
        name, arguments = f"attention{'_backward' * is_backward}", ""
        inputs = inputs[: 5 if is_backward else 3]  # gradient, q, k, v, out; or q, k, v
        outputs = outputs[: 3 if is_backward else 1]
    operands = _runs([operand_key(stream.tensors[i].operand) for i in inputs])
    written = "" if not op.written else f" writes {len({op.inputs[i] for i in op.written})}"
    return f"{op.phase} {op.kind} {name}{arguments} {operands}>{_runs(outputs)}{written}"


def _arguments(op: Op, inputs: Sequence[int]) -> str:
    """Arguments with tensors by their place among the distinct operands, without numbers that depend on the step."""

    def convert(value: Any) -> Any:
        match value:
            case {"t": position}:
                return {"t": inputs.index(op.inputs[position])}
            case {"ts": [first, count]}:
                return {"ts": [inputs.index(op.inputs[first]), count]}
            case {"rs": [_, count]}:
                return {"rs": count}
            case list():
                return [convert(item) for item in value]
        return value

    return json.dumps(convert([json.loads(op.args), json.loads(op.kwargs)]), separators=(",", ":"))


def _runs(keys: Sequence[str]) -> str:
    """Keys with how often each follows itself."""
    found: list[list[Any]] = []
    for key in keys:
        if found and found[-1][0] == key:
            found[-1][1] += 1
        else:
            found.append([key, 1])
    return ",".join(key if count == 1 else f"{count}*{key}" for key, count in found)


def condense(
    stream: Stream, kernels: Sequence[Sequence[Any]], peak_bytes: int, gpu: str = "NVIDIA H200"
) -> dict[str, Any]:
    """`kernels`: (name, seconds, launching call) of one step."""
    return {
        "gpu": gpu,
        "meta": stream.meta,
        "n_params": stream.n_params,
        "peak_bytes": peak_bytes,
        "ops": dict(sorted(ops_of(stream).items())),
        "kernels": [
            [op, name, n] for (op, name), n in sorted(Counter((k[2], short(k[0])) for k in kernels).items())
        ],
    }


def short(kernel: str) -> str:
    """The kind of a kernel: enough to tell matrix products, attention, splits and fills apart."""
    for sign in ("nvjet", "cublas", "gemm", "cudnn", "flash", "Memset", "Memcpy"):
        if sign in kernel:
            return "splitKreduce" if "splitKreduce" in kernel else sign
    return "other"


def write(record: dict[str, Any], name: str) -> None:
    text = json.dumps(record, separators=(",", ":"))
    (DATA / f"h200_{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(gzip.decompress((DATA / f"h200_{name}.json.gz").read_bytes()))
    return record


def main() -> None:
    import torch

    from flopcast.microbench import steps
    from flopcast.microbench.measure_step import profile_step, time_step
    from flopcast.roofline.trace import record_step

    for name, run in STEPS.items():
        step = steps.build(
            run["config"], "cuda", batch=run["batch"], seq=run["seq"], optimizer=run["optimizer"]
        )
        stream = record_step(step, {**run, "precision": "autocast-bf16", "device": "cuda"})
        peak_bytes = time_step(step, rounds=1).peak_bytes or 0
        kernels = [(k.name, k.seconds, k.op) for k in profile_step(step).kernels]
        write(condense(stream, kernels, peak_bytes, torch.cuda.get_device_name()), name)
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
