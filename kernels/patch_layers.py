"""Runs Qwen3, Qwen2, Llama and Mistral of transformers on fused kernels: norms, rotary embedding, activation, loss.

    patch(model)                        # a ...ForCausalLM (or its base model: then without the loss), on a GPU
    optimizer = flopcast.kernels.adamw.AdamW(model.parameters(), lr=1e-3)
    ...                                 # train as before, under autocast or not, eager or compiled
    unpatch(model)

Attention itself is chosen the usual way, `attn_implementation`, which `attention_transformers` extends.
What changes: RMSNorm is one kernel, and the one after attention includes the addition of the residual; rotary embedding
of queries and keys, with Qwen3's per-head norms, is one kernel, silu(gate) * up another; the loss reads the logits as
they are, without an fp32 copy, and makes its gradient together with the loss. Under autocast a norm returns the dtype
to which the next linear layer would cast anyway. With `whole` a layer of an eager step is one node of autograd.
Instances are patched, not classes: other models in the process stay as they are.

Refused (NotImplementedError, which says so): other activations than silu; models with experts and other families have
layers of their own (ValueError).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from flopcast.kernels import whole_layer
from flopcast.kernels.attention_transformers import DOCUMENTS, NAME
from flopcast.kernels.cross_entropy import IGNORE_INDEX, cross_entropy
from flopcast.kernels.rmsnorm import add_rms_norm, rms_norm
from flopcast.kernels.rope import rope_qk_norm
from flopcast.kernels.rotary import rotary
from flopcast.kernels.swiglu import swiglu

_UNDO = "_flopcast_unpatched"  # on the model: what `patch` replaced


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    if not is_compiling() and (normed := whole_layer.normed_before(self, hidden_states)) is not None:
        return normed
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return out


def _layer_forward(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
    past_key_values: Any = None, use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """As the decoder layer's own forward, with the first residual's addition in the norm that follows it; in an eager
    training step one node of autograd (`whole_layer`)."""
    is_whole = not is_compiling() and whole_layer.NEXT in self.__dict__
    if is_whole and past_key_values is None and _is_causal(self, attention_mask, kwargs):
        window, documents = _window_of(self.self_attn), kwargs.get(DOCUMENTS)
        whole = whole_layer.run(self, hidden_states, position_embeddings, window, documents)
        if whole is not None:
            return whole
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask,
        position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
        position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    norm = self.post_attention_layernorm
    normed, residual = add_rms_norm(attended, hidden_states, norm.weight, norm.variance_epsilon)
    out: Tensor = residual + self.mlp(normed)
    return out


def _is_causal(layer: Any, mask: Tensor | None, options: Any) -> bool:
    """Whether a layer's attention is our kernels' causal one, or within its window: no mask says otherwise."""
    attention = layer.self_attn
    return (
        attention.config._attn_implementation == NAME
        and (mask is None or mask.numel() == 0)
        and options.get("is_causal") in (None, True)
        and getattr(attention, "is_causal", True)
        and not attention.attention_dropout
    )


def _linear_forward(self: Any, x: Tensor) -> Tensor:
    if not is_compiling() and (out := whole_layer.linear(self, x)) is not None:
        return out
    return nn.Linear.forward(self, x)


def _window_of(attention: Any) -> int | None:
    """Mistral keeps one for all layers in its configuration, others each layer's own in its attention."""
    window: int | None = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    return window


def _attention_by(functions: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
    """As the attention's own forward, with Qwen3's norms and rotation in one kernel on the projections' own layout.

    `functions`: transformers' table of attention functions, `eager`: its eager one. An import in the forward would
    break the graph of torch 2.11's compiler.
    """

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        tokens = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*tokens, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = rope_qk_norm(
                query, key, self.q_norm.weight, self.k_norm.weight, *position_embeddings, self.q_norm.variance_epsilon
            )
        else:
            query, key = rotary(query, key, *position_embeddings)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = functions.get_interface(self.config._attn_implementation, eager)
        out, weights = attend(
            self, query, key, value, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, sliding_window=_window_of(self), **kwargs,
        )  # fmt: skip
        return self.o_proj(out.reshape(*tokens, -1).contiguous()), weights

    return forward


def causal_loss(
    logits: Tensor, labels: Tensor | None, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX, shift_labels: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """transformers' ForCausalLMLoss on the fused kernel: logits [batch, seq, vocab], labels [batch, seq] -> fp32."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_loss needs labels or shift_labels")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits.reshape(-1, vocab_size), target, ignore_index, reduction)
    return loss if num_items_in_batch is None else loss / torch.as_tensor(num_items_in_batch, device=loss.device)


def _forwards() -> dict[type[nn.Module], Callable[..., Any]]:
    """What replaces the forward of each class of module."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mistral import modeling_mistral as mistral
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    return {
        qwen3.Qwen3RMSNorm: _norm_forward,
        qwen3.Qwen3MLP: _mlp_forward,
        qwen3.Qwen3DecoderLayer: _layer_forward,
        qwen3.Qwen3Attention: _attention_by(ALL_ATTENTION_FUNCTIONS, qwen3.eager_attention_forward),
        llama.LlamaRMSNorm: _norm_forward,
        llama.LlamaMLP: _mlp_forward,
        llama.LlamaDecoderLayer: _layer_forward,
        llama.LlamaAttention: _attention_by(ALL_ATTENTION_FUNCTIONS, llama.eager_attention_forward),
        mistral.MistralRMSNorm: _norm_forward,
        mistral.MistralMLP: _mlp_forward,
        mistral.MistralDecoderLayer: _layer_forward,
        mistral.MistralAttention: _attention_by(ALL_ATTENTION_FUNCTIONS, mistral.eager_attention_forward),
        qwen2.Qwen2RMSNorm: _norm_forward,
        qwen2.Qwen2MLP: _mlp_forward,
        qwen2.Qwen2DecoderLayer: _layer_forward,
        qwen2.Qwen2Attention: _attention_by(ALL_ATTENTION_FUNCTIONS, qwen2.eager_attention_forward),
    }


def patch(model: nn.Module, *, whole: bool = False) -> None:
    """Makes this model run on the fused kernels, until `unpatch`; a second call changes nothing.

    `whole`: in eager training steps a decoder layer is one node of autograd where it can be (`whole_layer`).

    Raises ValueError on a model without such layers, NotImplementedError on another activation than silu.
    """
    if hasattr(model, _UNDO):
        return
    forwards = _forwards()
    found = [module for module in model.modules() if type(module) in forwards]
    if not any(type(module).__name__.endswith("DecoderLayer") for module in found):
        raise ValueError(
            f"{type(model).__name__} has no layers of Qwen3, Qwen2, Llama or Mistral: patch takes transformers' models "
            "of these"
        )
    activation = getattr(getattr(model, "config", None), "hidden_act", "silu")
    if activation != "silu":
        raise NotImplementedError(f"hidden_act {activation!r}: the fused MLP activation is silu")
    undo = []

    def replace(module: nn.Module, name: str, value: Any) -> None:
        undo.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    for module in found:
        replace(module, "forward", types.MethodType(forwards[type(module)], module))
    base: Any = getattr(model, "base_model", model)
    layers = [*getattr(base, "layers", ())] if whole else []
    norms = [*(layer.input_layernorm for layer in layers[1:]), getattr(base, "norm", None)]
    for layer, norm in zip(layers, norms, strict=False):
        replace(layer, whole_layer.NEXT, norm)
        replace(layer, whole_layer.PARTS, None)
    if hasattr(model, "lm_head"):  # a causal language model's head: nothing else with such layers makes this loss
        replace(model, "_loss_function", causal_loss)
        if whole and type(model.lm_head) is nn.Linear:
            replace(model.lm_head, "forward", types.MethodType(_linear_forward, model.lm_head))
    model.__dict__[_UNDO] = undo


def unpatch(model: nn.Module) -> None:
    """Undoes `patch`; does nothing to a model that is not patched."""
    for module, name, before in model.__dict__.pop(_UNDO, []):
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before


@contextmanager
def patched(model: nn.Module) -> Iterator[nn.Module]:
    """A context manager that gives the model, patched inside the block."""
    patch(model)
    try:
        yield model
    finally:
        unpatch(model)
