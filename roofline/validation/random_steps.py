"""Steps drawn by chance, to which nobody can have tuned a forecast: the same ones for the same seed, anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from random import Random
from typing import Any, TypeVar

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.stream.model.models import context_of, depth_of, load_config, make_config, n_params, with_depth

RANDOM = "random"  # group and suite
COUNT = 24  # about three minutes of an H200, eager

Value = TypeVar("Value")

# What is drawn, by how often of a hundred.
_PRECISIONS = {"autocast-bf16": 70, "bf16": 15, "autocast-fp16": 5, "tf32": 5, "fp32": 5}
_OPTIMIZERS = {"adamw-fused": 45, "adamw": 30, "sgd-momentum": 7, "adafactor-foreach": 8, "muon": 10}
_VOCABULARIES = {32_000: 25, 50_304: 25, 128_256: 25, 151_936: 25}
_MODELS = {
    "qwen3-0.6b": 20, "qwen3-1.7b": 20, "qwen3-4b": 15, "qwen3-8b": 10, "llama-3.2-1b": 15, "gpt2": 10, "qwen3-moe": 10,
}  # fmt: skip
_DENSE = {name: often for name, often in _MODELS.items() if name != "qwen3-moe"}
_IMAGES = {"resnet18": 15, "resnet50": 25, "mobilenet_v2": 15, "vit_s16": 15, "vit_b16": 15, "convnext_tiny": 15}

# A step's FLOPs at most, so that it takes half a second of an H200: in 16 bits, and in 32. Its parameters at most, so
# that it fits into 60 GB.
_MOST_WORK, _MOST_WORK_32 = 1.5e14, 1.5e13
_MOST_PARAMETERS = 2e9


def random_steps(seed: int, count: int = COUNT) -> list[StepPlan]:
    """`count` steps: pre-training of Qwen3 in drawn shapes and of published models with fewer layers, fine-tuning,
    calls of inference, and image models, with drawn batches and options."""
    draw = Random(seed)
    return [_pick(draw, _KINDS)(draw) for _ in range(count)]


def _pick(draw: Random, often: Mapping[Value, int]) -> Value:
    return draw.choices(list(often), list(often.values()))[0]


def _between(draw: Random, least: float, most: float, multiple: int) -> int:
    """A multiple, as likely between 1 and 2 times a size as between 2 and 4 times it."""
    size = 2 ** draw.uniform(log2(least), log2(most))
    return max(1, round(size / multiple)) * multiple


def _qwen3(draw: Random) -> StepPlan:
    head_dim = draw.choice((64, 128))
    kv_heads = draw.choice((1, 2, 4, 8))
    heads = kv_heads * _between(draw, 1, 32 / kv_heads, 1)
    width = _between(draw, 256, 4096, draw.choice((8, 64, 64, 128)))
    config = make_config(
        width=width, depth=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=_pick(draw, _VOCABULARIES),
        ffn=_between(draw, 2 * width, 4 * width, 64), tied=draw.random() < 0.5,
    )  # fmt: skip
    return _trained(draw, "qwen3", config, _between(draw, 2, 24, 1))


def _published(draw: Random) -> StepPlan:
    name = _pick(draw, _MODELS)
    config = load_config(name)
    return _trained(draw, name, config, _between(draw, 2, depth_of(config), 1))


def _fine_tuned(draw: Random) -> StepPlan:
    name = _pick(draw, _DENSE)
    config = load_config(name)
    layers = _between(draw, 2, depth_of(config), 1)
    options: dict[str, Any] = {"finetune": draw.choice(("lora", "lora", "last=1"))}
    if options["finetune"] == "lora":
        options |= {"lora_rank": draw.choice((8, 16, 64)), "base_dtype": draw.choice(("bf16", "fp32"))}
    return _trained(draw, name, config, layers, precision="autocast-bf16", optimizer="adamw-fused", **options)


def _trained(draw: Random, name: str, config: dict[str, Any], layers: int, **options: Any) -> StepPlan:
    """A step of training, of as many layers of these as its work allows."""
    settings = {
        "precision": _pick(draw, _PRECISIONS),
        "optimizer": _pick(draw, _OPTIMIZERS),
        "accumulate": _pick(draw, {1: 80, 2: 10, 4: 10}),
        "checkpoint": _pick(draw, {"none": 85, "full": 15}),
        "clip": _pick(draw, {0.0: 60, 1.0: 40}),
        **options,
    }
    seq = _between(draw, 128, min(4096, context_of(config) or 4096), 64)
    batch = max(1, _between(draw, 512, 16_384, seq) // seq)
    tokens = batch * seq * settings["accumulate"]
    most = _MOST_WORK_32 if settings["precision"] in ("fp32", "tf32") else _MOST_WORK
    layers = max(1, min(layers, _layers_for(config, min(most / (6 * tokens), _MOST_PARAMETERS))))
    return _step(f"{name}-d{layers}", config=with_depth(config, layers), batch=batch, seq=seq, **settings)


def _inference(draw: Random) -> StepPlan:
    name = _pick(draw, _DENSE)
    config = load_config(name)
    phase = draw.choice(("prefill", "decode"))
    context = _between(draw, 128, min(16_384, (context_of(config) or 16_384) - 1), 64)
    most = 64 if phase == "decode" else max(1, 16_384 // context)
    batch = _between(draw, 1, most, 1)
    return _step(name, config=config, batch=batch, precision="bf16", phase=phase, context=context)


def _image(draw: Random) -> StepPlan:
    name = _pick(draw, _IMAGES)
    size = _between(draw, 128, 288, 32)
    layout = draw.choice(("", "@nhwc"))
    module = f"{name}@{size}{layout}"
    batch, optimizer = _between(draw, 16, 128, 8), draw.choice(("adamw-fused", "sgd-momentum"))
    return _step(module, config={}, module=module, batch=batch, seq=1, optimizer=optimizer)


def _layers_for(config: dict[str, Any], parameters: float) -> int:
    """How many layers a model of that many parameters has beside its embedding."""
    one, two = (n_params(with_depth(config, depth)) for depth in (1, 2))
    return int((parameters - one) / (two - one)) + 1


def _step(name: str, **options: Any) -> StepPlan:
    return StepPlan(name=name, group=RANDOM, **options)


_KINDS: dict[Callable[[Random], StepPlan], int] = {
    _qwen3: 40, _published: 20, _fine_tuned: 15, _inference: 15, _image: 10,
}  # fmt: skip
