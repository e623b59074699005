"""Lists the real steps that `validate` runs; none of them is used in fitting, and nothing is tuned to them."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.recipe.settings import QUANTISED
from flopcast.roofline.stream.model.models import (
    CPU_BATCH,
    CPU_SEQ,
    CPU_VOCABULARY,
    depth_for,
    load_config,
    make_config,
    with_depth,
)
from flopcast.roofline.validation.architectures import ARCHITECTURES, architectures
from flopcast.roofline.validation.random_steps import RANDOM, random_steps

# The CPU suite measures shapes of widths 64, 128 and 256; these widths are equal to them or lie between them.
CPU_WIDTHS = ((64, 3), (96, 2), (160, 3), (192, 2), (256, 2))

# Groups of steps other than plain Qwen3's, for which the forecast is made. Tables list them separately.
OPTIONS, PATCHED, FAMILIES, COMPILED = "options", "patched", "other families", "compiled"
FINE_TUNE, INFERENCE, IMAGES, PRECISIONS = "fine-tune", "inference", "images", "precisions"
BITSANDBYTES = "bitsandbytes"  # steps that launch its kernels, where it is installed
RECOMPUTED = "checkpoints"  # steps that keep of a layer what is dear to compute again, and repeat the rest
OF_FEW_BITS = "quantised"  # calls of inference on weights of 8 and 4 bits
OWN = "own"  # the step of a model that a user names
INTERVALS = "intervals"  # steps that set the width of intervals: used neither in fitting nor in judging forecasts

WHOLE = "patch"  # steps of models patched by `kernels.patch.patch`, whose layers are whole

OWN_ADAMW = "adamw-triton"  # steps of flopcast's AdamW, most of which clip

SUITES = (
    "quick", "standard", "fused", WHOLE, OWN_ADAMW, FINE_TUNE, INFERENCE, OF_FEW_BITS, IMAGES, ARCHITECTURES,
    PRECISIONS, BITSANDBYTES, RECOMPUTED, RANDOM,
)  # fmt: skip

# A mixture of 16 experts, two a token, of a compiled suite's steps.
FEW_EXPERTS: dict[str, Any] = load_config("qwen3-moe") | {
    "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 32_000,
}  # fmt: skip

_ZOO = "flopcast.microbench.zoo:"
_FACTORIES = {"vit_b16": 64, "resnet50": 64, "mlp": 4096}  # of the zoo, with their batches


@functools.cache
def factories() -> frozenset[str]:
    """The names of the zoo's factories, read from its text, since importing it loads torch. A row of measurements that
    names another one is never run: what comes from a file must not decide which code is imported."""
    spec = importlib.util.find_spec(_ZOO.removesuffix(":"))
    assert spec is not None
    assert spec.origin is not None
    found = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)]
    return frozenset(_ZOO + function.name for function in found if not function.name.startswith("_"))


def validation_plans(device_type: str, name: str = "standard", mode: str = "eager", *, seed: int = 0) -> list[StepPlan]:
    """The steps to run on a device, small models first: "quick" for a minute or two, "standard" for all but those
    of the others, "fused" for those patched with the fused kernels, "patch" for models with whole layers,
    "adamw-triton" for those of flopcast's AdamW, "fine-tune" for adapters, frozen layers, clipping and optimizers other
    than AdamW, "inference" for calls without a backward, "quantised" for those on weights of 8 and 4 bits, "images" for
    image models, "architectures" for other families of transformers, "precisions" for fp32, tf32, fp16 and experts in
    bf16, "bitsandbytes" for QLoRA and AdamW in 8 bits, "checkpoints" for those that checkpoint selectively, "random"
    for those that `seed` draws.
    Of `mode` "compile" or "compile-graphs": compiled steps, of "inference", "architectures", "checkpoints" and
    "random" the same ones compiled."""
    if device_type != "cpu" and name == RANDOM:
        return [replace(plan, mode=mode) for plan in random_steps(seed)]
    if mode != "eager" and name in (INFERENCE, ARCHITECTURES, RECOMPUTED):
        return [replace(plan, mode=mode) for plan in _OF_SUITE[name]()]
    if mode != "eager":
        found = [replace(plan, mode=mode, group=COMPILED) for plan in _compiled()]
        if name == "quick":
            return found[:3]
        return [*found, *(replace(plan, mode=mode, group=INTERVALS) for plan in _compiled_intervals())]
    if device_type == "cpu":
        return [
            StepPlan(
                name=f"w{width}", config=make_config(width=width, depth=depth, vocab=CPU_VOCABULARY),
                batch=CPU_BATCH, seq=CPU_SEQ, group="cpu",
            )
            for width, depth in CPU_WIDTHS
        ]  # fmt: skip
    if name == "quick":
        return [_ladder(256), _ladder(1024), _large(1024)]
    if name in _OF_SUITE:
        return _OF_SUITE[name]()
    return [*_qwen3(), *_intervals(), *_options(), *_patched(), *_fused(), *_families()]


def _recomputed() -> list[StepPlan]:
    """Steps that checkpoint selectively: one that the host bounds, and larger ones of three families."""
    selective: dict[str, Any] = {"checkpoint": "selective", "group": RECOMPUTED}
    fused: dict[str, Any] = {"optimizer": "adamw-fused", **selective}
    return [
        _shipped("qwen3-0.6b", **selective),
        _shipped("gpt2", **fused, batch=16, seq=1024),
        _shipped("qwen3-0.6b", **fused, batch=8, seq=1024),
        _shipped("llama-3.2-1b", **fused, batch=4, seq=2048, clip=1.0),
        _shipped("qwen3-1.7b", **fused, batch=4, seq=4096),
    ]


def _precisions() -> list[StepPlan]:
    """Steps in precisions of which few kernels were measured; none is of a model to which any was fitted."""
    middle = {"batch": 4, "seq": 1024, "group": PRECISIONS}
    fused = "adamw-fused"
    return [
        _shipped("qwen3-0.6b", precision="autocast-fp16", **middle),
        _shipped("qwen3-0.6b", precision="tf32", **middle),
        _shipped("qwen3-0.6b", precision="fp32", **middle),
        _shipped("llama-3.2-1b", precision="autocast-fp16", optimizer=fused, clip=1.0, **middle),
        _shipped("llama-3.2-1b", precision="tf32", optimizer=fused, **middle),
        _shipped("qwen3-1.7b", precision="bf16", optimizer=fused, **middle),
        _shipped("qwen3-moe", precision="bf16", optimizer=fused, **middle),
        _shipped("gpt2", precision="fp32", optimizer=fused, **middle),
    ]


def _bitsandbytes() -> list[StepPlan]:
    """Steps on weights of 4 bits and with states of 8, each also apart from the other; of many rows and of few, for
    which the library has a product of its own."""
    group = {"group": BITSANDBYTES}
    fused, eight = "adamw-fused", "adamw8bit"
    qlora: dict[str, Any] = {"finetune": "qlora", "optimizer": fused, **group}
    return [
        _shipped("qwen3-0.6b", **qlora, batch=2, seq=2048),
        _shipped("qwen3-0.6b", optimizer=eight, batch=4, seq=1024, **group),
        _shipped("qwen3-4b", **qlora, batch=2, seq=2048),
        _shipped("qwen3-0.6b", **qlora, batch=1, seq=512),
        _shipped("qwen3-4b", **{**qlora, "optimizer": eight}, batch=1, seq=1024),
        _shipped("llama-3.2-1b", optimizer=eight, batch=4, seq=1024, **group),
        _shipped("llama-3.2-1b", **qlora, checkpoint="full", batch=4, seq=2048),
        _shipped("qwen3-1.7b", **{**qlora, "lora_rank": 64, "lora_targets": "q_proj,v_proj"}, batch=4, seq=1024),
        _shipped("qwen3-1.7b", optimizer=eight, precision="bf16", batch=4, seq=1024, **group),
        _shipped("qwen3-8b", **{**qlora, "optimizer": eight}, batch=2, seq=1024),
    ]


def _intervals() -> list[StepPlan]:
    """Qwen3 steps from which the deviation of real steps from their forecasts is estimated
    (`studies.shipped.intervals`): of other widths, depths and batches than the steps that forecasts are judged by."""
    sizes = (
        (384, 3, 4, 256, "adamw"), (448, 8, 8, 512, "adamw"), (576, 12, 4, 256, "adamw-fused"),
        (1216, 16, 2, 256, "adamw"), (1280, 4, 4, 512, "adamw-fused"), (768, 12, 16, 512, "adamw-fused"),
        (1792, 5, 4, 512, "adamw"), (1280, 10, 1, 4096, "adamw-fused"), (2304, 5, 2, 2048, "adamw"),
        (2816, 5, 8, 768, "adamw"), (3328, 4, 4, 1024, "adamw-fused"), (1984, 9, 4, 768, "adamw-fused"),
    )  # fmt: skip
    return [
        StepPlan(
            name=f"w{width}-d{depth}", config=make_config(width=width, depth=depth), batch=batch, seq=seq,
            optimizer=optimizer, group=INTERVALS,
        )
        for width, depth, batch, seq, optimizer in sizes
    ]  # fmt: skip


def _qwen3() -> list[StepPlan]:
    """The ladder by both depth laws, widths between and beyond its own, the shipped configs, and larger batches."""
    fused = "adamw-fused"
    plans = [_ladder(width) for width in (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096)]
    ln = {"law": "ln", "group": "ln ladder"}
    plans += [_ladder(width, **ln) for width in (256, 512, 768, 1024, 1536, 2048)]
    plans += [_ladder(width, optimizer=fused, **ln) for width in (2560, 3072)]
    off = {"group": "off the ladder"}
    plans += [_ladder(width, **off) for width in (320, 640, 896, 1152, 1408, 1664, 1920, 3584)]
    plans += [_ladder(width, optimizer=fused, **off) for width in (320, 1152, 2560)]
    plans += [_shipped("qwen3-0.6b"), _shipped("qwen3-0.6b", optimizer=fused)]
    plans += [_shipped("qwen3-1.7b"), _shipped("qwen3-1.7b", optimizer=fused)]
    plans += [_large(width) for width in (256, 512, 640, 1024, 1664, 2048, 2560, 3584)]
    plans += [_large(width, optimizer="adamw") for width in (1024, 2048)]
    plans += [_large(width, batch=4, seq=4096) for width in (512, 1024, 2048)]
    plans += [_large(width, batch=2, seq=8192) for width in (512, 1024, 2048)]
    plans += [
        _shipped(model, batch=8, seq=1024, optimizer=fused, group="large batch")
        for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
    ]
    plans += [_shipped("qwen3-4b"), _shipped("qwen3-4b", optimizer=fused)]
    return [*plans, _shipped("qwen3-8b"), _shipped("qwen3-8b", optimizer=fused)]


def _options() -> list[StepPlan]:
    """Steps with options that change the op stream: accumulation, checkpointing, precision."""
    options = {"group": OPTIONS}
    return [
        _ladder(1024, accumulate=4, **options),
        _shipped("qwen3-0.6b", batch=8, seq=1024, optimizer="adamw-fused", checkpoint="full", **options),
        _large(2048, precision="bf16", **options),
        _large(1024, precision="tf32", **options),
    ]


def _patched() -> list[StepPlan]:
    """Steps with other kernels in the same op stream: Triton's matrix products and attention, and the SDPA backend that
    torch does not pick."""
    options = {"group": PATCHED}
    return [
        _ladder(1024, matmul="triton", **options),
        _large(512, matmul="triton", **options),
        _large(2048, matmul="triton", **options),
        _large(1024, attention="triton", **options),
        _large(1024, batch=2, seq=8192, attention="triton", **options),
        _large(1024, matmul="triton", attention="triton", **options),
        _shipped(
            "qwen3-0.6b", batch=8, seq=1024, optimizer="adamw-fused", matmul="triton", attention="triton", **options
        ),
        _large(1024, attention="sdpa-flash", **options),
        _large(2048, batch=4, seq=4096, attention="sdpa-flash", **options),
    ]


def _fused() -> list[StepPlan]:
    """Steps patched to run the fused memory-bound kernels, with torch's products and attention and with Triton's."""
    options = {"group": PATCHED, "fused": "triton"}
    return [
        _ladder(512, **options),
        _ladder(1024, **options),
        _ladder(2048, optimizer="adamw-fused", **options),
        _large(512, **options),
        _large(1024, **options),
        _large(2048, **options),
        _large(1024, batch=2, seq=8192, **options),
        _shipped("qwen3-0.6b", **{"optimizer": "adamw-fused", **options}),
        _shipped("qwen3-0.6b", batch=8, seq=1024, optimizer="adamw-fused", **options),
        _large(1024, matmul="triton", attention="triton", **options),
    ]


def _whole() -> list[StepPlan]:
    """Steps of Qwen3 patched whole, of the ladder, off it and published, from steps that the host bounds to those that
    the device does."""
    fused: dict[str, Any] = {"group": PATCHED, "fused": "patch", "attention": "triton", "optimizer": "adamw-fused"}
    return [
        _ladder(512, **fused),
        _ladder(1024, **{**fused, "optimizer": "adamw"}),
        _ladder(1152, **{**fused, "batch": 4, "seq": 512}),
        _ladder(2048, **fused),
        _large(640, **fused),
        _large(1024, **fused),
        _large(2048, **fused),
        _large(1024, **{**fused, "batch": 2, "seq": 8192}),
        _shipped("qwen3-0.6b", **fused),
        _shipped("qwen3-0.6b", **fused, batch=2, seq=1024),
        _shipped("qwen3-1.7b", **fused),
        _shipped("qwen3-1.7b", **fused, batch=4, seq=1024),
    ]


def _own_adamw() -> list[StepPlan]:
    """Steps of flopcast's AdamW, with the norm inside where they clip: Qwen3's ladder, published configs, another
    family or two; of few tokens, where optimizer and host are most of a step, and of many."""
    own: dict[str, Any] = {"group": PATCHED, "optimizer": "adamw-triton"}
    clipped = {**own, "clip": 1.0}
    many: dict[str, Any] = {**clipped, "batch": 8, "seq": 1024}
    return [
        _ladder(512, **clipped),
        _ladder(1024, **clipped, accumulate=4),
        _ladder(2048, **own),
        _large(1024, **clipped),
        _large(2048, **clipped),
        _shipped("qwen3-0.6b", **clipped),
        _shipped("qwen3-0.6b", **many),
        _shipped("qwen3-0.6b", **many, fused="patch", attention="triton"),
        _shipped("llama-3.2-1b", **{**many, "batch": 4}),
        _shipped("gpt2", **own, batch=8, seq=1024),
    ]


def _fine_tuned() -> list[StepPlan]:
    """Steps that train a part of a model, or with another optimizer; of sizes at which the device bounds most. Those
    whose forecast is least sure come first. Adapters stand beside weights in bf16, as users keep them, and in fp32."""
    group = {"group": FINE_TUNE}
    middle, small = {"batch": 4, "seq": 1024, **group}, {"batch": 8, "seq": 1024, **group}
    fused = "adamw-fused"
    lora: dict[str, Any] = {"optimizer": fused, "finetune": "lora"}
    wide: dict[str, Any] = {**lora, "base_dtype": "fp32"}
    return [
        _shipped("qwen3-0.6b", **wide, checkpoint="full", **small),
        _shipped("qwen3-0.6b", optimizer="muon", **middle),
        _shipped("qwen3-0.6b", optimizer="adafactor-foreach", **middle),
        _shipped("qwen3-0.6b", **lora, checkpoint="full", **small),
        _shipped("qwen3-0.6b", **lora, **small),
        _shipped("llama-3.2-1b", **lora, lora_rank=64, **middle),
        _shipped("qwen3-1.7b", **lora, lora_targets="q_proj,v_proj", **middle),
        _shipped("qwen3-4b", **lora, **{**middle, "batch": 2}),
        _shipped("llama-3.2-1b", **lora, checkpoint="full", **small),
        _shipped("llama-3.2-1b", optimizer="muon", **small),
        _shipped("qwen3-1.7b", optimizer="adafactor", clip=1.0, **middle),
        _shipped("qwen3-1.7b", optimizer="adafactor-foreach", **middle),
        _shipped("qwen3-0.6b", **wide, **small),
        _shipped("llama-3.2-1b", **wide, lora_rank=64, **middle),
        _shipped("qwen3-1.7b", **wide, lora_targets="q_proj,v_proj", **middle),
        _shipped("qwen3-4b", **wide, **{**middle, "batch": 2}),
        _shipped("qwen3-0.6b", optimizer="sgd", **middle),
        _shipped("qwen3-0.6b", optimizer="sgd-momentum", clip=1.0, **middle),
        _shipped("qwen3-0.6b", optimizer=fused, clip=1.0, **small),
        _shipped("qwen3-0.6b", optimizer=fused, finetune="last=4", **small),
        _shipped("llama-3.2-1b", optimizer="adamw", clip=1.0, **middle),
        _shipped("gpt2", optimizer=fused, finetune="last=2", **small),
    ]


def _inference() -> list[StepPlan]:
    """Calls without a backward, in bf16: prefills and decodes of few and many sequences, short and long ones."""
    prefills = {
        "qwen3-0.6b": ((1, 2048), (8, 1024), (2, 8192)), "llama-3.2-1b": ((8, 1024),), "gpt2": ((16, 512),),
        "qwen3-4b": ((1, 4096), (4, 1024)),
    }  # fmt: skip
    decodes = {
        "qwen3-0.6b": ((1, 1024), (16, 2048), (64, 1024), (4, 16384)), "llama-3.2-1b": ((8, 512), (32, 4096)),
        "gpt2": ((32, 512),), "qwen3-4b": ((1, 1024), (16, 4096), (64, 1024)), "qwen3-8b": ((8, 8192),),
    }  # fmt: skip
    return [
        _shipped(name, batch=batch, precision="bf16", phase=phase, context=context, group=INFERENCE)
        for phase, calls in (("decode", decodes), ("prefill", prefills))
        for name, sizes in calls.items()
        for batch, context in sizes
    ]


def _quantised() -> list[StepPlan]:
    """Calls on weights of 8 and 4 bits: the same of each kind, chosen before any was measured."""
    of_each = [
        ("decode", "qwen3-0.6b", 16, 2048), ("decode", "llama-3.2-1b", 8, 512), ("decode", "qwen3-4b", 4, 2048),
        ("prefill", "llama-3.2-1b", 8, 1024), ("prefill", "qwen3-4b", 1, 2048),
    ]  # fmt: skip
    calls = [(weights, *call) for call in of_each for weights in QUANTISED]
    calls += [(weights, "decode", "qwen3-8b", 1, 1024) for weights in ("int8", "int4")]
    # added when the prefills in int4 had been looked at
    calls += [("int4", "prefill", "qwen3-0.6b", 8, 1024), ("int4", "prefill", "qwen3-8b", 1, 4096)]
    calls += [("int4", "prefill", "llama-3.2-1b", 2, 1024), ("fp8", "prefill", "qwen3-8b", 1, 4096)]
    return [
        _shipped(
            name, batch=batch, precision="bf16", base_dtype=weights, phase=phase, context=context, group=OF_FEW_BITS
        )
        for weights, phase, name, batch, context in calls
    ]


def _images() -> list[StepPlan]:
    """Steps of image models by name, of several sizes and in both layouts."""
    batches = {
        "mobilenet_v2@nhwc": 128, "convnext_tiny": 64, "resnet50@nhwc": 64, "efficientnet_b0": 64, "mobilenet_v2": 96,
        "resnet18": 128, "resnet50@160": 96, "vit_s16": 128, "vit_b16@384": 16, "convnext_tiny@nhwc": 64,
        "efficientnet_b0@nhwc": 64, "resnet18@288@nhwc": 64, "resnet101": 32, "vit_l16": 16,
    }  # fmt: skip
    return [
        StepPlan(name=name, config={}, module=name, batch=batch, seq=1, optimizer="adamw-fused", group=IMAGES)
        for name, batch in batches.items()
    ]


def _families() -> list[StepPlan]:
    """Steps of models other than Qwen3, given by a config or by a factory of `microbench.zoo`."""
    return [
        _shipped("llama-3.2-1b", group=FAMILIES),
        _shipped("llama-3.2-1b", batch=8, seq=1024, optimizer="adamw-fused", group=FAMILIES),
        _shipped("gpt2", batch=8, seq=1024, group=FAMILIES),
        _shipped("qwen3-moe", batch=8, seq=1024, optimizer="adamw-fused", group=FAMILIES),
        *(_module(factory, batch=batch) for factory, batch in _FACTORIES.items()),
    ]


def _compiled() -> list[StepPlan]:
    """Steps that are run compiled, from 4 x 128 to 8 x 2048 tokens: widths of the ladder and off it, heads of 64 and
    128, vocabularies of 32,000 and 151,936, and other families. Quick to compile first; no law was fitted to one. What
    is added is added at the end, so that rows of before keep their places."""
    fused = "adamw-fused"
    off = {1152: make_config(width=1152, depth=4), 1664: make_config(width=1664, depth=4),
           3584: make_config(width=3584, depth=2)}  # fmt: skip
    narrow = make_config(width=640, depth=6, heads=10, kv_heads=5, head_dim=64)
    small = make_config(width=1536, depth=4, heads=24, kv_heads=8, head_dim=64, vocab=32_000)
    wide = make_config(width=2048, depth=3, vocab=32_000)
    small_llama = load_config("llama-3.2-1b") | {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 6,
                                                 "num_attention_heads": 24}  # fmt: skip
    models: list[tuple[str, dict[str, Any], list[tuple[int, int, str]]]] = [
        ("w1024-d5", make_config(width=1024, depth=5), [(4, 128, "adamw"), (4, 256, fused), (8, 2048, fused)]),
        ("w640-d6-h64", narrow, [(4, 128, fused), (8, 1024, fused)]),
        ("w1152-d4", off[1152], [(4, 256, fused), (8, 1024, fused)]),
        ("w1536-d4-h64-v32000", small, [(4, 256, fused), (8, 2048, fused)]),
        ("w2048-d3-v32000", wide, [(4, 128, fused), (8, 1024, fused)]),
        ("w1664-d4", off[1664], [(4, 512, fused), (8, 2048, fused)]),
        ("w3584-d2", off[3584], [(4, 256, fused), (4, 1024, fused)]),
        ("gpt2", load_config("gpt2"), [(4, 256, fused), (8, 1024, fused)]),
        ("llama-3.2-1b", load_config("llama-3.2-1b"), [(4, 128, fused), (8, 1024, fused)]),
        ("qwen3-0.6b", load_config("qwen3-0.6b"), [(4, 256, fused), (8, 1024, fused)]),
        ("qwen3-1.7b", load_config("qwen3-1.7b"), [(4, 256, fused)]),
        ("qwen3-moe", load_config("qwen3-moe"), [(8, 512, fused)]),
        # widths that inductor pads, or need not, and the aligned one beside them; more near the host's border
        ("w1023-d4", make_config(width=1023, depth=4, heads=8), [(4, 1024, fused)]),
        ("w1032-d4", make_config(width=1032, depth=4, heads=8), [(4, 1024, fused)]),
        ("w1024-d4", make_config(width=1024, depth=4, heads=8), [(4, 1024, fused)]),
        ("llama-w1536-d6", small_llama, [(4, 128, fused)]),
        ("gpt2-w1024-d6", _small_gpt2(1024, 6), [(4, 512, fused)]),
        ("w896-d6-v50304", make_config(width=896, depth=6, vocab=50_304), [(2, 512, "adamw")]),
        # experts, which run between graphs: at few tokens the host bounds, at many the device
        ("qwen3-moe-d4", with_depth(load_config("qwen3-moe"), 4), [(4, 128, fused), (8, 1024, fused)]),
        ("moe-w768-d6-e16", FEW_EXPERTS, [(4, 256, fused), (8, 1024, fused)]),
    ]
    plans = [
        StepPlan(name=name, config=config, batch=batch, seq=seq, optimizer=optimizer)
        for name, config, runs in models
        for batch, seq, optimizer in runs
    ]
    modules = [_module(factory, batch=batch, optimizer=fused) for factory, batch in _FACTORIES.items()]
    accumulated = StepPlan(name="w1280-d4", config=make_config(width=1280, depth=4), optimizer=fused, accumulate=4)
    return [*plans[:15], *modules, *plans[15:], accumulated]


def _compiled_intervals() -> list[StepPlan]:
    """Compiled steps that set the width of the intervals of compiled ones, as `_intervals` of eager ones: of other
    widths, depths and batches than the steps that forecasts are judged by."""
    fused = "adamw-fused"
    llama = load_config("llama-3.2-1b") | {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 4,
                                           "num_attention_heads": 12, "num_key_value_heads": 4,
                                           "vocab_size": 32_000}  # fmt: skip
    models: list[tuple[str, dict[str, Any], int, int, str]] = [
        ("w768-d2", make_config(width=768, depth=2), 4, 256, fused),
        ("w448-d5", make_config(width=448, depth=5), 8, 512, fused),
        ("llama-w768-d4-v32000", llama, 4, 256, fused),
        ("gpt2-w512-d3", _small_gpt2(512, 3), 8, 128, "adamw"),
        ("w1280-d3-h64-v50304", make_config(width=1280, depth=3, heads=20, kv_heads=4, head_dim=64, vocab=50_304),
         2, 1024, fused),
        ("w2560-d2-v32000", make_config(width=2560, depth=2, vocab=32_000), 4, 2048, fused),
        ("w1984-d3", make_config(width=1984, depth=3), 2, 512, "adamw"),
    ]  # fmt: skip
    found = [
        StepPlan(name=name, config=config, batch=batch, seq=seq, optimizer=optimizer)
        for name, config, batch, seq, optimizer in models
    ]
    return [*found, _module("mlp", batch=1024, optimizer=fused)]


def _small_gpt2(width: int, depth: int) -> dict[str, Any]:
    return load_config("gpt2") | {"n_embd": width, "n_layer": depth, "n_head": width // 64}


def _ladder(width: int, *, law: str = "printed", **options: Any) -> StepPlan:
    depth = depth_for(width, law)
    return StepPlan(name=f"w{width}-d{depth}", config=make_config(width=width, depth=depth), **options)


def _large(width: int, **options: Any) -> StepPlan:
    defaults = {"batch": 8, "seq": 1024, "optimizer": "adamw-fused", "group": "large batch"}
    return _ladder(width, **{**defaults, **options})


def _shipped(name: str, **options: Any) -> StepPlan:
    return StepPlan(name=name, config=load_config(name), **{"group": "published configs", **options})


def _module(factory: str, **options: Any) -> StepPlan:
    return StepPlan(name=factory, config={}, module=_ZOO + factory, seq=1, group=FAMILIES, **options)


_OF_SUITE: dict[str, Callable[[], list[StepPlan]]] = {
    "fused": _fused, WHOLE: _whole, OWN_ADAMW: _own_adamw, FINE_TUNE: _fine_tuned, INFERENCE: _inference,
    OF_FEW_BITS: _quantised, IMAGES: _images, ARCHITECTURES: architectures, PRECISIONS: _precisions,
    BITSANDBYTES: _bitsandbytes, RECOMPUTED: _recomputed,
}  # fmt: skip
