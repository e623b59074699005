"""Golden files: what a real training step launched on a GPU, condensed to what a trace must reproduce.

    python tests/roofline/golden.py OUT [--device cpu] [NAME...]

records those of all model families on a CUDA machine into OUT (an H200 with torch 2.11 made those committed in
tests/data; the five Qwen3 steps of `STEPS` with an earlier version of this file). OUT/full gets the streams op by op.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flopcast.kernels.shapes import Operand
from flopcast.microbench.recipe.settings import Recipe
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.ops.op_stream import Op, Stream

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


_SMALL = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 768, "vocab_size": 4096}  # fmt: skip
_QWEN3 = make_config(width=256, depth=3, heads=2, vocab=4096)
_GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 4096}
_MOE = {"model_type": "qwen3_moe", **_SMALL, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": True}  # fmt: skip
_LLAMA = {"model_type": "llama", **_SMALL, "head_dim": 64, "tie_word_embeddings": True}
_MISTRAL = {"model_type": "mistral", **_SMALL, "head_dim": 64, "tie_word_embeddings": False}
_ZOO: dict[str, dict[str, Any]] = {
    "vit_b16": {"batch": 8, "size": 64, "layers": 3, "width": 192},
    "resnet50": {"batch": 8, "size": 64, "depths": (2, 2, 2, 2)},
    "resnet50_channels_last": {"batch": 8, "size": 64, "depths": (2, 2, 2, 2)},
    "mlp": {"batch": 256, "width": 256, "depth": 3},
    "transformer_encoder": {"batch": 4, "seq": 64, "width": 256, "depth": 3},
    "train_mlp": {"batch": 256, "width": 256, "depth": 3},
}

# Other families and other ways to run a step: a config or a factory of the zoo (at `_ZOO`'s sizes), and run options.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"config": _LLAMA},
    "gpt2": {"config": _GPT2},
    "gpt2_bf16": {"config": _GPT2, "precision": "bf16", "optimizer": "adamw-fused"},
    "mistral": {"config": {**_MISTRAL, "sliding_window": 4096}},
    "mistral_window": {"config": {**_MISTRAL, "sliding_window": 64}},
    "qwen3_moe": {"config": _MOE},
    "qwen3_moe_bf16": {"config": _MOE, "precision": "bf16"},
    "qwen3_bf16": {"config": _QWEN3, "precision": "bf16"},
    "qwen3_fp32": {"config": _QWEN3, "precision": "fp32"},
    "qwen3_tf32": {"config": _QWEN3, "precision": "tf32"},
    "qwen3_accumulate": {"config": _QWEN3, "accumulate": 3},
    "qwen3_checkpoint": {"config": _QWEN3, "checkpoint": "full"},
    "gpt2_checkpoint": {"config": _GPT2, "checkpoint": "full"},
    **{name: {"factory": name} for name in _ZOO},
    "vit_b16_fp32": {"factory": "vit_b16", "precision": "fp32"},
    "vit_b16_bf16": {"factory": "vit_b16", "precision": "bf16"},
    "resnet50_fp32": {"factory": "resnet50", "precision": "fp32"},
    "resnet50_bf16": {"factory": "resnet50", "precision": "bf16"},
}
RUN = {"precision": "autocast-bf16", "optimizer": "adamw", "accumulate": 1, "checkpoint": "none"}


def factory_of(entry: dict[str, Any]) -> Callable[[], Any]:
    """The zoo's factory of an entry of FAMILIES, at its small sizes."""
    from flopcast.microbench import zoo

    name = entry["factory"]
    return lambda: getattr(zoo, name)(**_ZOO[name])


def run_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The run options of an entry of FAMILIES."""
    return {**RUN, **{name: entry[name] for name in RUN if name in entry}}


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
        # gradient, q, k, v, out; or q, k, v, which may be parts of one tensor
        inputs = list(dict.fromkeys(op.inputs[: 5 if is_backward else 3]))
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
        "kernels": [[op, name, n] for (op, name), n in sorted(Counter((k[2], short(k[0])) for k in kernels).items())],
    }


def short(kernel: str) -> str:
    """The kind of a kernel: enough to tell matrix products, attention, splits and fills apart."""
    for sign in ("nvjet", "cublas", "gemm", "cudnn", "flash", "Memset", "Memcpy"):
        if sign in kernel:
            return "splitKreduce" if "splitKreduce" in kernel else sign
    return "other"


def write(record: dict[str, Any], name: str, folder: Path = DATA) -> None:
    text = json.dumps(record, separators=(",", ":"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"h200_{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(gzip.decompress((DATA / f"h200_{name}.json.gz").read_bytes()))
    return record


def record(name: str, device: str) -> tuple[Stream, dict[str, Any]]:
    """A real step of FAMILIES[name] or STEPS[name]: its stream, and the golden record of it."""
    import torch

    from flopcast.microbench.recipe import training_step
    from flopcast.microbench.steps.measure import profile_kernels
    from flopcast.roofline.stream.tracer.record_step import record_step

    entry = {**STEPS, **FAMILIES}[name]
    run = run_of(entry)
    step: Any
    if "config" in entry:
        sizes = {"batch": entry.get("batch", 4), "seq": entry.get("seq", 256)}
        step = training_step.build(entry["config"], device, Recipe(**sizes, **run))
        meta = {"config": entry["config"], **sizes}
    else:
        with torch.device(device):
            made = factory_of(entry)()
        loss_fn = made[2] if isinstance(made, tuple) and len(made) > 2 else None
        step = (
            training_step.build_module(made[0], made[1], device, Recipe(**run), loss_fn=loss_fn)
            if isinstance(made, tuple)
            else training_step.FunctionStep(made, device)
        )
        meta = {"factory": entry["factory"], "sizes": _ZOO[entry["factory"]]}
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step.run()
    peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else 0
    stream = record_step(step, {**meta, **run, "device": device})
    kernels = profile_kernels(step, with_ops=True)
    found = condense(
        stream,
        [(k.name, k.seconds, k.op) for k in kernels],
        peak_bytes,
        torch.cuda.get_device_name() if is_cuda else "the processor",
    )
    seconds: dict[str, float] = {}
    for kernel in kernels:
        seconds[kernel.op] = seconds.get(kernel.op, 0.0) + kernel.seconds
    return stream, {**found, "seconds": {op: float(f"{value:.4g}") for op, value in sorted(seconds.items())}}


def main() -> None:
    import torch

    from flopcast.roofline.stream.ops import op_stream as streams

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="default: all of FAMILIES")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    failed = 0
    for name in options.names or FAMILIES:
        start = time.perf_counter()
        try:
            stream, found = record(name, options.device)
        except Exception as fault:  # the others are still worth having
            failed += 1
            print(f"{name}: {type(fault).__name__}: {' '.join(str(fault).split())[:300]}", flush=True)
            continue
        write(found, name, options.out)
        streams.save(stream, options.out / "full" / f"{name}.json.gz")
        print(f"{name}: {len(stream.ops)} ops, {time.perf_counter() - start:.1f} s", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
