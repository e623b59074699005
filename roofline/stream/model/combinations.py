"""Which settings of a step go together: what is valid of each alone, `Recipe` says itself."""

from __future__ import annotations

from collections.abc import Iterable

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import ADAPTERS, MOST_SEQ, MOST_TOKENS, ONE_GPU, QUANTISED, Recipe

PARALLEL_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum")


def check_together(recipe: Recipe) -> None:
    """Raises UsageError for settings that contradict one another or are not modelled together."""
    if recipe.batch * recipe.seq > MOST_TOKENS:
        raise UsageError(
            f"batch x seq is {recipe.batch} x {recipe.seq} tokens: at most {MOST_TOKENS} make a micro-batch; lower one "
            "of the two"
        )
    _check_finetune(recipe)
    _check_phase(recipe)
    _check_own_adamw(recipe)
    _check_quantised(recipe)
    if recipe.precision == "autocast-fp16":
        _refuse(
            recipe, ("phase", "parallel", "fused"),
            "with precision autocast-fp16, whose gradients a GradScaler scales: not modelled yet; use autocast-bf16, "
            "or leave one of the two out",
        )  # fmt: skip
    if recipe.mode != "eager":
        _check_compiled(recipe)
    if recipe.is_parallel:
        _check_parallel(recipe)


def _refuse(recipe: Recipe, names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of these settings that is not at its default."""
    unusual = recipe.unusual
    for name in names:
        if name in unusual:
            raise UsageError(f"{name} {unusual[name]} {why}")


def _check_finetune(recipe: Recipe) -> None:
    if recipe.finetune == "qlora" and recipe.precision != "autocast-bf16":
        raise UsageError(
            f"finetune 'qlora' with precision {recipe.precision!r}: its 4-bit weights are unpacked to bf16; use "
            "--precision autocast-bf16"
        )
    if recipe.base_dtype == "fp32" and recipe.precision == "bf16":
        raise UsageError("base_dtype 'fp32' with precision 'bf16', which keeps weights in bf16: leave one out")
    if recipe.finetune not in ADAPTERS:
        _refuse(recipe, ("lora_rank", "lora_targets"), f"with finetune {recipe.finetune}: it is of lora and qlora")
    if recipe.fused == "patch":
        _check_patched(recipe)
    if recipe.finetune in ADAPTERS and recipe.fused != "none":
        raise UsageError(
            f"fused {recipe.fused!r} with finetune {recipe.finetune}: the fused kernels know no adapters; leave one out"
        )


def _check_patched(recipe: Recipe) -> None:
    for name, valid, why in (
        ("attention", "triton", "a patched model runs on the Triton attention"),
        ("matmul", "torch", "the layers of a patched model that are one node have torch's products"),
        ("parallel", ONE_GPU, "patched steps on one GPU alone are modelled"),
        ("phase", "train", "it is of training steps"),
    ):
        if (value := getattr(recipe, name)) != valid:
            raise UsageError(f"fused 'patch' with {name} {value!r}: {why}; give {name} {valid!r}")


def _check_own_adamw(recipe: Recipe) -> None:
    """Adapters are in fp32 whatever they stand beside."""
    if recipe.optimizer == "adamw-triton" and recipe.finetune not in ADAPTERS and recipe.weights_dtype != "fp32":
        name = "precision" if recipe.precision == "bf16" else "base_dtype"
        raise UsageError(
            f"optimizer 'adamw-triton' with {name} {getattr(recipe, name)!r}: its kernel steps parameters in fp32; use "
            "--optimizer adamw-fused, or fp32 weights, as --precision autocast-bf16 has them"
        )


def _check_phase(recipe: Recipe) -> None:
    if recipe.phase == "train":
        for name in ("context", "cache"):
            if name in (unusual := recipe.unusual):
                raise UsageError(f"{name} {unusual[name]!r} without a phase: give --phase prefill or decode with it")
        return
    if recipe.cache == "dynamic" and recipe.mode != "eager":
        raise UsageError(
            f"cache 'dynamic' with mode {recipe.mode!r}: it grows with every token, for which torch would compile "
            "anew; use --cache static, or leave one of the two out"
        )
    if not 1 <= recipe.context <= MOST_SEQ:
        raise UsageError(
            f"context is {recipe.context}: phase {recipe.phase} needs --context, the tokens of a sequence, from 1 to "
            f"{MOST_SEQ}"
        )
    if recipe.batch * recipe.context > MOST_TOKENS:
        raise UsageError(
            f"batch x context is {recipe.batch} x {recipe.context} tokens: valid are {MOST_TOKENS} at most"
        )
    for name in ("accumulate", "checkpoint", "optimizer", "fused", "clip", "finetune"):
        _refuse(recipe, (name,), f"with phase {recipe.phase}, which trains nothing: leave {name} out")


def _check_quantised(recipe: Recipe) -> None:
    """Weights of few bits, where nothing is forecast with them."""
    if recipe.base_dtype not in QUANTISED:
        return
    told = f"base_dtype {recipe.base_dtype!r}"
    if recipe.phase == "train":
        raise UsageError(
            f"{told}: torch multiplies such weights without a backward; give --phase prefill or decode with it, "
            "train on fp32 or bf16"
        )
    if recipe.precision != "bf16":
        raise UsageError(f"{told} with precision {recipe.precision!r}: its products give bf16; use --precision bf16")
    if recipe.matmul != "torch":
        raise UsageError(
            f"{told} with matmul {recipe.matmul!r}: of such weights torch's own products alone are modelled; leave "
            "one of the two out"
        )


def _check_compiled(recipe: Recipe) -> None:
    if recipe.optimizer == "adamw8bit":
        raise UsageError(
            f"optimizer 'adamw8bit' with mode {recipe.mode!r}: it is modelled beside eager steps alone; use --mode "
            "eager, or adamw-fused"
        )
    if recipe.finetune == "qlora":
        raise UsageError(
            f"finetune 'qlora' with mode {recipe.mode!r}: bitsandbytes' kernels are modelled beside eager steps alone; "
            "use --mode eager, or lora"
        )
    unusual = recipe.unusual
    for name, why in (
        ("fused", "compiled code fuses these operations itself, and leaves custom ones as they are"),
        ("matmul", "compiled code calls cuBLAS for its products"),
        ("attention", "compiled code calls what torch picked while it compiled"),
    ):
        if name in unusual and unusual[name] not in QUANTISED:
            raise UsageError(f"{name} {unusual[name]!r} with mode {recipe.mode!r}: {why}; leave one of the two out")


def _check_parallel(recipe: Recipe) -> None:
    layout = recipe.layout
    layout.check_built()
    is_divided = layout.world > layout.data
    are_whole = layout.kind == "ddp" and not is_divided
    if recipe.optimizer not in PARALLEL_OPTIMIZERS and not (are_whole and recipe.mode == "eager"):
        raise UsageError(
            f"optimizer {recipe.optimizer!r} with parallel {recipe.parallel}: modelled in eager steps of ddp=N alone, "
            "whose ranks hold all of each parameter and of its states; valid with others are "
            f"{', '.join(PARALLEL_OPTIMIZERS)}"
        )
    if recipe.mode != "eager":
        _check_compiled_parallel(recipe)
    told = f"with parallel {recipe.parallel}"
    _refuse(recipe, ("phase", "fused"), f"{told}: not modelled yet on several GPUs; leave one of the two out")
    if layout.tp > 1 or layout.ep > 1 or layout.pp > 1:
        _refuse(
            recipe, ("clip",),
            f"{told}: torch's clip_grad_norm_ takes the norm of one GPU's parameters, or of those that one mesh "
            "divides; over layers, experts or stages each trainer sums it by code of its own; leave one of the two out",
        )  # fmt: skip
    if is_divided:
        _refuse(
            recipe, ("finetune", "base_dtype"),
            f"{told}: modelled with ddp, zero1, zero2, fsdp and hsdp alone; leave one of the two out",
        )  # fmt: skip
    if recipe.finetune == "qlora" and layout.kind != "ddp":
        raise UsageError(
            f"finetune 'qlora' {told}: what divided ranks do with bitsandbytes' 4-bit weights is not modelled yet; use "
            "ddp=N, or lora"
        )


def _check_compiled_parallel(recipe: Recipe) -> None:
    layout, kinds = recipe.layout, ("ddp=N", "zero1=N", "zero2=N", "fsdp=N", "hsdp=RxS")
    if layout.is_own:
        raise UsageError(
            f"mode {recipe.mode} with parallel {recipe.parallel}: what torch compiles of a module that lays itself out "
            f"is not modelled; valid with it are {', '.join(kinds)}, or use --mode eager"
        )
    if recipe.mode == "compile" and layout.world > layout.data:
        raise UsageError(
            f"mode compile with parallel {recipe.parallel}: what torch compiles of layers, sequences or experts that "
            f"are divided is not modelled yet; valid with it are {', '.join(kinds)}, or use --mode eager"
        )
    if recipe.mode == "compile-graphs":
        raise UsageError(
            f"mode compile-graphs with parallel {recipe.parallel}: a CUDA graph reads and writes fixed memory, and "
            "FSDP gathers parameters into memory that it gives back, DistributedDataParallel puts gradients into "
            "buckets behind it; what torch then copies or captures again is not modelled; use --mode compile"
        )
