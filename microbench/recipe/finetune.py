"""Says what of a model is trained: everything, its last layers, or low-rank adapters on a frozen base (peft)."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from flopcast.errors import UsageError
from flopcast.microbench.recipe.quantised import replace_layers
from flopcast.microbench.recipe.settings import Recipe


def fine_tuned(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """Returns a transformers model with what the recipe's `finetune` does not train frozen.

    - "full": all is trained;
    - "last=N": the last N layers alone, without embedding, final norm and output layer;
    - "qlora": adapters as below, on linear layers whose weights bitsandbytes keeps in 4 bits;
    - "lora": peft's adapters of `lora_rank` on the modules named `lora_targets` (with commas between; "all-linear":
      every linear layer but the output), as `peft.get_peft_model` adds them.

    Raises UsageError where the model has fewer layers, or peft is missing or refuses the model.
    """
    finetune = recipe.finetune
    if finetune == "full":
        return model
    if finetune == "qlora":
        four_bit_base(model)
        adapted = _with_adapters(model, recipe.lora_rank, recipe.lora_targets)
        for module in adapted.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # type: ignore[assignment]  # as peft has it beside 4 bits
        return adapted
    if finetune == "lora":
        return _with_adapters(model, recipe.lora_rank, recipe.lora_targets)
    count = int(finetune.removeprefix("last="))
    layers = _layers(model)
    if count > len(layers):
        raise UsageError(f"finetune {finetune}: the model has {len(layers)} layers; valid is last=1 to that")
    model.requires_grad_(False)
    for layer in layers[-count:]:
        layer.requires_grad_(True)
    return model


def _layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    if not stacks:
        raise UsageError(f"finetune last=N: {type(model).__name__} has no list of layers; valid are full and lora")
    return max(stacks, key=len)


def _with_adapters(model: torch.nn.Module, rank: int, targets: str) -> torch.nn.Module:
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as fault:
        raise UsageError(
            f"finetune lora needs peft ({fault}): `pip install peft`; without it valid are full and last=N"
        ) from fault
    modules = targets if targets == Recipe.lora_targets else targets.split(",")
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, task_type="CAUSAL_LM")
    try:
        return peft.get_peft_model(model, adapters)  # type: ignore[no-any-return]
    except ValueError as fault:  # no module of these names
        text = " ".join(str(fault).split())[:200]
        raise UsageError(
            f"lora_targets {targets!r}: peft says: {text}; valid are {Recipe.lora_targets}, or names of the model's "
            "linear layers with commas between, such as q_proj,v_proj"
        ) from fault


def four_bit_base(model: torch.nn.Module) -> None:
    """Keeps the linear layers of a model, but the output layer, in 4 bits by bitsandbytes, as transformers loads them
    with "nf4", double quantisation and products in bf16, and freezes the rest. The tracer has the library's calls in
    its place (`bitsandbytes_calls`).

    Raises UsageError as `replace_layers`, and where bitsandbytes is missing.
    """
    try:
        layers: Any = importlib.import_module("bitsandbytes.nn")
    except ImportError as fault:
        raise UsageError(
            f"finetune qlora runs on bitsandbytes ({fault}): `pip install bitsandbytes`; without it valid are full, "
            "lora and last=N"
        ) from fault

    def packed(_path: str, layer: torch.nn.Linear) -> torch.nn.Module:
        weight, device = layer.weight, layer.weight.device
        kept: Any = layers.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.bfloat16,
            compress_statistics=True, quant_type="nf4", device="meta",
        )  # fmt: skip
        kept.weight = layers.Params4bit(
            weight.detach().to(torch.bfloat16), requires_grad=False, compress_statistics=True, quant_type="nf4",
            module=kept,
        ).to(device)  # fmt: skip  # .to packs it
        kept.weight.stands_for = weight.numel()
        kept.bias = layer.bias
        made: torch.nn.Module = kept
        return made

    replace_layers(model, packed, "finetune qlora", "finetune lora")
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # by which peft picks its adapters
