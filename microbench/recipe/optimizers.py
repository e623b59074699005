"""Makes the optimizers that `--optimizer` names, as torch, or the library that people use, makes them by default."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from flopcast.errors import UsageError
from flopcast.kernels.adamw import AdamW
from flopcast.microbench.recipe.settings import OPTIMIZERS

# torch's default learning rate of AdamW; its value does not change which kernels are launched.
LEARNING_RATE = 1e-3
MOMENTUM = 0.9
# That of steps that are measured, on one batch again and again: so small that they do not learn it by heart and keep
# their numbers. At 1e-3 a compiled Llama with weights in bf16 had none after twenty steps, and a step on NaN drew 500 W
# on an H200 and took 75.9 ms, where steps on numbers drew 710 W and took 83.3.
MEASURED_LEARNING_RATE = 1e-7


def make_optimizers(
    model: torch.nn.Module, optimizer: str = "adamw", foreach: bool | None = None, clip: float = 0.0
) -> tuple[torch.optim.Optimizer, ...]:
    """Makes the optimizers of one of OPTIMIZERS, for the parameters that require a gradient.

    - "adamw", "sgd", "sgd-momentum" (0.9): torch's own, by default foreach on CUDA and a loop on the CPU;
    - "adamw-fused": torch's fused AdamW;
    - "adamw-triton": `flopcast.kernels.adamw`, which clips to the norm `clip` while it steps; of the others `clip` is
      the step's (`TrainingStep`);
    - "adafactor": torch's own, by default a loop that waits for the device at every parameter; "adafactor-foreach";
    - "muon": torch's Muon for the matrices within the model and foreach AdamW for the rest (embedding, output layer,
      norms, biases), as its authors use it;
    - "adamw8bit": that of bitsandbytes.

    `foreach=True` selects CUDA's default on any device, which the tracer needs. Raises ValueError for another name, and
    UsageError where this torch, or the missing library, has no such optimizer, or it takes no such parameters.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r}: valid are {', '.join(OPTIMIZERS)}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "muon":
        inner = matrices_within(model)
        rest = [p for p in parameters if all(p is not matrix for matrix in inner)]
        if not inner:
            raise UsageError("optimizer muon: the model has no matrix to train besides embeddings and the output layer")
        muon = _made("torch.optim", "Muon", optimizer, "torch 2.9 or later")(inner, lr=LEARNING_RATE)
        return (muon, torch.optim.AdamW(rest, lr=LEARNING_RATE, foreach=foreach)) if rest else (muon,)
    if optimizer == "adamw-triton":
        return (_own_adamw(model, clip),)
    if optimizer == "adamw8bit":
        return (adamw_of_8_bits(parameters, lr=LEARNING_RATE),)
    options: dict[str, Any] = {"lr": LEARNING_RATE, "foreach": foreach}
    match optimizer:
        case "adamw-fused":
            return (torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True),)
        case "sgd" | "sgd-momentum":
            return (torch.optim.SGD(parameters, momentum=MOMENTUM if optimizer == "sgd-momentum" else 0.0, **options),)
        case "adafactor" | "adafactor-foreach":
            return (torch.optim.Adafactor(parameters, lr=LEARNING_RATE, foreach=optimizer == "adafactor-foreach"),)
    return (torch.optim.AdamW(parameters, **options),)


def hold_learning_rate(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Gives optimizers the learning rate of steps that are measured, MEASURED_LEARNING_RATE."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = MEASURED_LEARNING_RATE


def _own_adamw(model: torch.nn.Module, clip: float) -> torch.optim.Optimizer:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise UsageError(
                f"optimizer adamw-triton with {name} of {str(parameter.dtype).removeprefix('torch.')}"
                f"{'' if parameter.is_contiguous() else ', not contiguous'}: its kernel steps contiguous parameters in "
                "fp32; use adamw-fused"
            )
    return AdamW(trained.values(), lr=LEARNING_RATE, max_norm=clip)


def adamw_of_8_bits(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The library's. The tracer has its calls in its place (`bitsandbytes_calls`)."""
    kind = _made("bitsandbytes.optim", "AdamW8bit", "adamw8bit", "bitsandbytes: `pip install bitsandbytes`")
    made: torch.optim.Optimizer = kind(parameters, lr=lr)
    return made


def matrices_within(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns the trained matrices of a model but those of embeddings and of the output layer, where it names one."""
    find = getattr(model, "get_output_embeddings", None)  # of transformers' models
    outer = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outer += [found] if find is not None and (found := find()) is not None else []
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]


def _made(module: str, name: str, optimizer: str, needed: str) -> Any:
    """Returns a class of a library. Raises UsageError where this machine's library does not have it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        rest = ", ".join(other for other in OPTIMIZERS if other != optimizer)
        raise UsageError(f"optimizer {optimizer} needs {needed}; without it valid are {rest}") from None
