"""Builds and runs one training step of a real model: the step that is forecast and measured.

The same recipe serves the tracer (fake tensors), the host calibration (tiny widths) and the validation (real runs), so
that all three refer to the same step: fp32 weights, autocast to bf16, `sdpa` attention (`eager` in models without it),
`use_cache=False`, `labels=input_ids`, `zero_grad(set_to_none=True)`, and no clipping but by `clip`. With `accumulate`
micro-batches each loss is divided by their number and gradients are accumulated in place; with `checkpoint` "full"
every layer's activations are recomputed in the backward pass, with "selective" all but the costliest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from flopcast.microbench.recipe.finetune import fine_tuned
from flopcast.microbench.recipe.optimizers import make_optimizers
from flopcast.microbench.recipe.patches import attention_implementation
from flopcast.microbench.recipe.settings import CHECKPOINTS, FUSED, PRECISIONS, Recipe

AUTOCAST = {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.float16}
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)  # what linear layers call, without and with bias


@dataclass
class TrainingStep:
    """A model, its optimizers and one micro-batch. `run()` is one step; the phases can be run one by one.

    `batch` is what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments. `loss_fn`
    takes what the model returns; without it the loss is computed by `loss_of`. `clip`: the norm to which the
    gradients are clipped before the optimizers step; 0 for none, or where an optimizer clips by itself. `scaler`: with
    precision "autocast-fp16" what scales the loss, so that small gradients do not vanish in fp16, and skips a step
    whose gradients are not finite: as torch's guide to mixed precision has it.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any
    precision: str
    device_type: str  # "cpu" or "cuda"
    accumulate: int = 1  # micro-batches per step
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    clip: float = 0.0
    scaler: torch.amp.GradScaler | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def forward(self) -> torch.Tensor:
        """The loss of one micro-batch, divided by their number."""
        with self.autocast():
            output = call(self.model, self.batch)
            loss = self.loss_fn(output) if self.loss_fn is not None else loss_of(output)
        return loss if self.accumulate == 1 else loss / self.accumulate

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def optimizer_step(self) -> None:
        if self.clip:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def phases(self) -> Iterator[str]:
        """Runs one whole step and yields the name of each phase when it is enqueued."""
        self.zero_grad()
        for _ in range(self.accumulate):
            loss = self.forward()
            yield "forward"
            self.backward(loss)
            yield "backward"
        self.optimizer_step()
        yield "optimizer"

    def run(self) -> torch.Tensor:
        """Runs one whole step; returns the loss of its last micro-batch."""
        return self.run_phases().detach()

    def run_phases(self) -> torch.Tensor:
        """As `run`, but the loss that is returned is still attached to the autograd graph."""
        self.zero_grad()
        for _ in range(self.accumulate):
            loss = self.forward()
            self.backward(loss)
        self.optimizer_step()
        return loss


@dataclass
class FunctionStep:
    """A training step given as one function, which runs forward, backward and optimizer."""

    function: Callable[[], Any]
    device_type: str

    def run(self) -> Any:
        return self.function()


def scaler_for(precision: str, device_type: str) -> torch.amp.GradScaler | None:
    """The gradient scaler of a precision that needs one."""
    return torch.amp.GradScaler(device_type) if precision == "autocast-fp16" else None


def call(model: torch.nn.Module, batch: Any) -> Any:
    """Calls `model` with `batch`: a tensor, a tuple of positional or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output: `output.loss` or `output["loss"]` if there is one, a scalar output itself, else the
    mean of the output in fp32; of several outputs the first tensor counts. Raises TypeError where there is no
    tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = output
    while not isinstance(found, torch.Tensor):
        values = list(found.values()) if isinstance(found, Mapping) else found
        if not isinstance(values, (list, tuple)) or not values:
            raise TypeError(f"the module returns {type(output).__name__}, which holds no tensor to take a loss from")
        found = values[0]
    return found if found.ndim == 0 else found.float().mean()


def build_model(
    config: Mapping[str, Any],
    attention: str = "sdpa",
    precision: str = "autocast-bf16",
    checkpoint: str = "none",
    base_dtype: str = "auto",
) -> torch.nn.Module:
    """A causal language model from the fields of a transformers config.json, on the default device.

    `attention` is an implementation as transformers names it; "sdpa" stands for transformers' own choice, which is
    "eager" for models that have no other. Weights are of `base_dtype`, "bf16" or "fp32"; "auto" is fp32, except with
    precision "bf16". A built model is not cast, because fake tensors cannot be cast and tables that transformers keeps
    in fp32 (rotary frequencies) would be cast too.
    Raises ValueError when transformers does not know the `model_type` or refuses a field.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    # a copy: transformers writes into nested fields (rope_scaling)
    fields = {
        name: deepcopy(value) for name, value in config.items() if name not in ("architectures", "dtype", "torch_dtype")
    }
    transformers_config = AutoConfig.for_model(**fields)
    if type(transformers_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError("transformers has no causal language model of it; give another model by --module")
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        transformers_config,
        attn_implementation=None if attention == "sdpa" else attention,
        dtype=torch.bfloat16 if "bf16" in (precision, base_dtype) else torch.float32,
    )
    model.train()
    set_checkpointing(model, checkpoint)
    return model


def set_checkpointing(model: torch.nn.Module, checkpoint: str) -> None:
    """Sets the checkpointing of a transformers model. "full": every layer recomputes its activations in the backward
    pass. "selective": all but its attention and every second of its matrix products, from the first on, whose results
    are kept, as torchtitan does it (`selective_ac_option = "op"`).

    Raises ValueError for an unknown name, and for a model that does not support checkpointing.
    """
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint {checkpoint!r}: valid are {', '.join(CHECKPOINTS)}")
    if checkpoint == "none":
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"{type(model).__name__} has no gradient_checkpointing_enable, as transformers' models have: "
            "use checkpoint 'none', and torch.utils.checkpoint inside the module"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpoint == "selective":
        options["context_fn"] = _selective_contexts
    enable(gradient_checkpointing_kwargs=options)


def _selective_contexts() -> tuple[Any, Any]:
    """The two contexts of torch.utils.checkpoint for one call of a layer: its forward, and what is computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts: Counter[bool] = Counter()  # of products, by whether they are computed again

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = "attention" in op.name()  # whichever of torch's operators, or our own
        if op in PRODUCTS:
            keeps = counts[context.is_recompute] % 2 == 0
            counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def use_fused(model: torch.nn.Module, fused: str) -> None:
    """Selects fused kernels. "triton": the model runs on the fused memory-bound kernels instead of torch's
    (`kernels.patch_layers`). "patch": on all kernels, as `kernels.patch.patch` has them, attention included.

    Raises ValueError for an unknown name, and for a model that has no Qwen3 layers.
    """
    if fused not in FUSED:
        raise ValueError(f"fused {fused!r}: valid are {', '.join(FUSED)}")
    if fused == "triton":
        from flopcast.kernels.patch_layers import patch

        patch(model)
    elif fused == "patch":
        from flopcast.kernels.patch import patch as patch_all

        patch_all(model)


def find_layers(model: torch.nn.Module) -> torch.nn.ModuleList | None:
    """Finds the stack of layers: the one ModuleList of as many modules as the model's config counts layers, or else the
    longest of one class with equal parameter shapes. Those of the first may differ, as where some have experts."""
    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # DistributedDataParallel's module has no config, but the model within it
    depths = (getattr(getattr(module, "config", None), "num_hidden_layers", None) for module in model.modules())
    depth = next((depth for depth in depths if depth is not None), None)
    counted = [stack for stack in stacks if len(stack) == depth]
    if len(counted) == 1:
        return counted[0]
    return max((stack for stack in stacks if has_equal_layers(stack)), key=len, default=None)


def has_equal_layers(stack: torch.nn.ModuleList) -> bool:
    """Whether the modules of a stack are of one class, with equal parameter shapes."""

    def signature(layer: torch.nn.Module) -> tuple[Any, ...]:
        return (type(layer), *((name, tuple(p.shape)) for name, p in layer.named_parameters()))

    return len({signature(layer) for layer in stack}) == 1


def causal_lm_batch(input_ids: torch.Tensor) -> dict[str, Any]:
    """The batch that a causal language model is trained on: the ids are also the labels."""
    return {"input_ids": input_ids, "labels": input_ids, "use_cache": False}


def build(config: Mapping[str, Any], device: torch.device | str, recipe: Recipe, seed: int = 0) -> TrainingStep:
    """Builds a step ready to run on `device`: weights are drawn there, tokens are from torch.randint, and every
    micro-batch is the same.

    Raises ValueError for an unknown precision, optimizer or checkpointing, and torch.OutOfMemoryError when the step
    does not fit.
    """
    _check_precision(recipe.precision)
    device = torch.device(device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision == "tf32"
    attention = attention_implementation(recipe.attention)
    with torch.device(device):
        model = build_model(config, attention, recipe.precision, recipe.checkpoint, recipe.weights_dtype)
        own_config: Any = model.config
        vocabulary = int(own_config.vocab_size)  # `config` may leave it to its architecture
        model = fine_tuned(model, recipe)
    use_fused(model, recipe.fused)
    input_ids = torch.randint(0, vocabulary, (recipe.batch, recipe.seq), device=device)
    return TrainingStep(
        model,
        make_optimizers(model, recipe.optimizer, clip=recipe.clip),
        causal_lm_batch(input_ids),
        recipe.precision,
        device.type,
        accumulate=recipe.accumulate,
        clip=recipe.clip_before,
        scaler=scaler_for(recipe.precision, device.type),
    )


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: valid are {', '.join(PRECISIONS)}")


def build_module(
    module: torch.nn.Module,
    batch: Any,
    device: torch.device | str,
    recipe: Recipe,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    foreach: bool | None = None,
) -> TrainingStep:
    """Builds a step as `build` does, for any module and its batch. With precision "bf16" the module's parameters and
    the batch's floating-point tensors are cast.

    Raises ValueError as `build` does, and for a module without trainable parameters.
    """
    _check_precision(recipe.precision)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters that require a gradient: nothing to train")
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision == "tf32"
    set_checkpointing(module, recipe.checkpoint)
    module = module.to(device)
    batch = map_tensors(batch, lambda tensor: tensor.to(device))
    if recipe.precision == "bf16":
        module = module.to(torch.bfloat16)
        batch = map_tensors(batch, lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    device_type = str(device).partition(":")[0]
    return TrainingStep(
        module,
        make_optimizers(module, recipe.optimizer, foreach, recipe.clip),
        batch,
        recipe.precision,
        device_type,
        accumulate=recipe.accumulate,
        clip=recipe.clip_before,
        loss_fn=loss_fn,
        scaler=scaler_for(recipe.precision, device_type),
    )


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a batch with `function` of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(item, function) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map_tensors(item, function) for item in value)
    return value
