"""Runs a Qwen3, Qwen2, Llama or Mistral of transformers on the Triton kernels by one call: norms to loss, attention,
products.

    patch(model)                        # a ...ForCausalLM (or its base model: then without the loss), on a GPU
    step = torch.compile(model, fullgraph=True)      # or as it is, or mode="reduce-overhead", or in a CUDA graph
    unpatch(model)

`patch_layers` says what the fused kernels change, and `whole_layer` what becomes of a layer of an eager training step
under autocast. Attention is `attention_transformers`', with the model's sliding
window if it has one, and a batch given without attention_mask and cache is taken to be causal: each row one sequence,
or packed documents where position_ids begin anew (as DataCollatorWithFlattening packs) or cu_seq_lens_q says so. The
device is not asked (eager transformers looks for packed sequences and waits for the answer; compiled, it builds a mask
of all pairs, which keeps SDPA from its causal kernels). Products stay cuBLAS's unless `matmul` says otherwise:
"triton", or a function that names the faster of both for each product (`flopcast.patch` takes the one that the profile
of a GPU gives).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flopcast.kernels import documents, patch_layers
from flopcast.kernels.attention import HEAD_DIMS
from flopcast.kernels.attention_transformers import DOCUMENTS, NAME, NO_MASK, register_with_transformers
from flopcast.kernels.matmul_chosen import Choice, chosen_matmul, remember
from flopcast.kernels.references import require_known
from flopcast.kernels.rowwise import autocast_dtype

ATTENTIONS = ("triton", "sdpa")
_UNDO = "_flopcast_patched"  # on the model: what undoes `patch`


def _causal_forward(
    self: Any, input_ids: Tensor | None = None, attention_mask: Any = None, position_ids: Tensor | None = None,
    past_key_values: Any = None, inputs_embeds: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """As the model's own forward, which makes no mask where one of four dimensions is given to it."""
    given = inputs_embeds if input_ids is None else input_ids
    of_tokens = position_ids is None or position_ids.dim() == 2
    if attention_mask is None and of_tokens and past_key_values is None and given is not None:
        attention_mask = torch.empty(NO_MASK, dtype=torch.bool, device=given.device)
        if position_ids is not None:
            kwargs[DOCUMENTS] = documents.from_positions(position_ids.expand(given.shape[0], -1))
        elif kwargs.get("cu_seq_lens_q") is not None and given.shape[0] == 1:
            kwargs[DOCUMENTS] = documents.from_cu_seqlens(kwargs["cu_seq_lens_q"], given.shape[1])
    return type(self).forward(
        self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs,
    )  # fmt: skip


def _linear_forward(self: Any, x: Tensor) -> Tensor:
    """As nn.Linear.forward, with products by the choice that `patch` left on the module."""
    weight: Tensor = self.weight
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    rows = chosen_matmul(x.reshape(-1, x.shape[-1]), weight, "nt", self._flopcast_products)
    out = rows.reshape(*x.shape[:-1], weight.shape[0])
    return out if self.bias is None else out + self.bias.to(out.dtype)


def _replace(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of the instance alone; returns what undoes it."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value

    def undo() -> None:
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before

    return undo


def patch(model: nn.Module, *, attention: str = "triton", matmul: str | Choice = "torch", whole: bool = True) -> None:
    """Makes this model of transformers run on the kernels, until `unpatch`; a second call changes nothing.

    `attention`: "triton", or "sdpa" for torch's. `matmul`: "torch", "triton", or a function of a `shapes.Gemm` that
    returns one of these. `whole`: see `whole_layer`, which takes attention "triton" and matmul "torch". Raises
    ValueError on a model without such layers and unknown names, NotImplementedError on heads, dropout and activations
    that the kernels do not have.
    """
    require_known("attention", attention, ATTENTIONS)
    if isinstance(matmul, str):
        require_known("matmul", matmul, ("torch", "triton"))
    if _UNDO in model.__dict__:
        return
    config: Any = getattr(model, "config", None)
    if attention == "triton" and config is not None:
        _require_attention(config)
    patch_layers.patch(model, whole=whole)
    undo: list[Callable[[], None]] = [lambda: patch_layers.unpatch(model)]
    base: Any = getattr(model, "base_model", model)
    if attention == "triton":
        before = config._attn_implementation
        base.set_attn_implementation(register_with_transformers())
        undo.append(lambda: base.set_attn_implementation(before))
        undo.append(_replace(base, "forward", types.MethodType(_causal_forward, base)))
    if matmul != "torch":
        name = matmul if isinstance(matmul, str) else remember(matmul)
        for module in model.modules():
            if type(module) is nn.Linear:
                undo.append(_replace(module, "_flopcast_products", name))
                undo.append(_replace(module, "forward", types.MethodType(_linear_forward, module)))
    model.__dict__[_UNDO] = undo


def _require_attention(config: Any) -> None:
    """Raises NotImplementedError for what `NAME` would refuse in the middle of a step."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"{NAME}: head_dim {head_dim} is not one of {HEAD_DIMS}: use attention='sdpa'")
    if getattr(config, "attention_dropout", 0.0):
        raise NotImplementedError(f"{NAME} has no dropout: use attention='sdpa'")


def unpatch(model: nn.Module) -> None:
    """Undoes `patch`; does nothing to a model that is not patched."""
    for undo in reversed(model.__dict__.pop(_UNDO, [])):
        undo()


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """A context manager that gives the model, patched inside the block."""
    patch(model, **options)
    try:
        yield model
    finally:
        unpatch(model)
