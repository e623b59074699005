"""Builds and runs one call of inference of a real model: a prompt at once (prefill), or one more token (decode).

The model's own call with transformers' own cache of keys and values: no sampling, no batching of requests, no queue.
The cache is one that grows with every call (dynamic), or one that is there from the start, in whose places calls write
(static), as compiled calls and CUDA graphs need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flopcast.microbench.recipe.patches import attention_implementation
from flopcast.microbench.recipe.quantised import quantise
from flopcast.microbench.recipe.settings import NEW_TOKENS, QUANTISED, Recipe
from flopcast.microbench.recipe.training_step import build_model


def build_inference(
    config: Mapping[str, Any], device: torch.device | str, recipe: Recipe, seed: int = 0
) -> InferenceStep:
    """Builds a call ready to run on `device`, of weights and tokens drawn there. Raises as `training_step.build`."""
    device = torch.device(device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision == "tf32"
    attention = attention_implementation(recipe.attention)
    with torch.device(device):
        model: Any = build_for_inference(config, attention, recipe.precision, recipe.base_dtype)
    tokens = recipe.context if recipe.phase == "prefill" else 1
    ids = torch.randint(0, int(model.config.vocab_size), (recipe.batch, tokens), device=device)
    return InferenceStep(
        model, ids, recipe.precision, device.type, recipe.phase, recipe.context, cache_kind=recipe.cache_kind
    )


def build_for_inference(
    config: Mapping[str, Any], attention: str, precision: str, base_dtype: str = "auto"
) -> torch.nn.Module:
    """As `build_model`, not for training, and also with a `base_dtype` of QUANTISED, whose errors it has too."""
    if base_dtype not in QUANTISED:
        return build_model(config, attention, precision, base_dtype=base_dtype).eval()
    model = build_model(config, attention, precision).eval()
    quantise(model, base_dtype)
    return model


@dataclass
class InferenceStep:
    """A causal language model and `batch` sequences of `context` tokens. `run()` is one call without a backward: of
    "prefill" the whole context into an empty cache, of "decode" one token more each, into a cache that holds it.

    As `generate` does, a prefill computes the logits of the last token alone. `cache_kind` "dynamic": a cache that each
    prefill makes anew; a run of a decode leaves one of one token more, from which the next goes on. "static": one with
    places for NEW_TOKENS more than the context, which stays; a prefill writes from its beginning, a decode goes on and
    begins anew where it is full. `refill()` makes it as it was before the first call.
    """

    model: torch.nn.Module
    input_ids: torch.Tensor
    precision: str
    device_type: str  # "cpu" or "cuda"
    phase: str
    context: int
    optimizers: tuple[()] = ()
    cache: Any = field(default=None, repr=False)
    cache_kind: str = "dynamic"
    _places: int = 0  # that decodes have left

    @property
    def batch(self) -> torch.Tensor:
        return self.input_ids

    @property
    def cached(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors that the cache holds now, each with its layer: keys and values, or states that do not grow."""
        layers = enumerate(self.cache.layers if self.cache is not None else ())
        return [(tensor, index) for index, layer in layers for tensor in _held(layer) if tensor is not None]

    @property
    def lengths(self) -> list[tuple[torch.Tensor, int]]:
        """Of a static cache, how many tokens each layer holds, which is read on the device."""
        if self.cache is None or self.cache_kind == "dynamic":
            return []
        layers = enumerate(self.cache.layers)
        return [(layer.cumulative_length, index) for index, layer in layers if hasattr(layer, "cumulative_length")]

    def refill(self) -> None:
        """Makes the cache as it is before a call: empty, or with the keys and values of the context."""
        if self.cache_kind == "static":
            self._refill_static()
            return
        from transformers import DynamicCache

        config: Any = self.model.config
        if self.phase == "prefill":
            self.cache = DynamicCache(config=config)
            return
        if self.cache is None:
            self.cache = self._of_one_token()
        for layer in self.cache.layers:
            if _has_keys(layer):  # without the copies that the layer's `update` makes
                kept = min(self.context, layer.sliding_window - 1) if layer.is_sliding else self.context
                layer.keys, layer.values = (_zeros(tensor, kept) for tensor in (layer.keys, layer.values))
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = self.context

    def _refill_static(self) -> None:
        if self.cache is None:
            from transformers import StaticCache

            config: Any = self.model.config
            self.cache = StaticCache(config=config, max_cache_len=self.context + NEW_TOKENS)
            for index, filled in enumerate(self._of_one_token().layers):
                if _has_keys(filled):
                    self.cache.layers[index].lazy_initialization(_zeros(filled.keys, 0), _zeros(filled.values, 0))
                else:
                    self.cache.layers[index] = filled
        self._set_lengths(0 if self.phase == "prefill" else self.context)
        self._places = NEW_TOKENS

    def _of_one_token(self) -> Any:
        """A cache as a call of one token leaves it, which alone says what a model keeps of each layer: keys wider than
        values (DeepSeek-V3), of fewer heads than the config counts (Falcon), or a state that does not grow."""
        from transformers import DynamicCache

        model: Any = getattr(self.model, "_orig_mod", self.model)
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), self.autocast():
            model(input_ids=self.input_ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def _set_lengths(self, tokens: int) -> None:
        """Says to a static cache how many tokens it holds; one with a window counts on the host, too, those gone by."""
        if self.lengths and not tokens:  # in one launch; a model may keep states alone
            torch._foreach_zero_([length for length, _ in self.lengths])
        for length, index in self.lengths:
            layer = self.cache.layers[index]
            if tokens:
                length.fill_(min(tokens, layer.max_cache_len))
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = tokens

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "autocast-bf16":
            return torch.autocast(self.device_type, dtype=torch.bfloat16)
        return nullcontext()

    def phases(self) -> Iterator[str]:
        """Runs one call and yields the name of its one phase when it is enqueued."""
        self.run()
        yield "forward"

    def run(self) -> torch.Tensor:
        """Runs one call and returns the logits of the last token."""
        given: dict[str, Any] = {}
        if self.cache is None or (self.phase == "prefill" and self.cache_kind == "dynamic"):
            self.refill()
        if self.cache_kind == "static":
            given = self._begun()
        with torch.no_grad(), self.autocast():
            output = self.model(
                input_ids=self.input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **given
            )
        logits: torch.Tensor = output.logits
        return logits

    def _begun(self) -> dict[str, Any]:
        """Places for a call's tokens in the static cache; what `generate` hands to it besides."""
        if self.phase == "decode":
            if not self._places:
                self.refill()
            self._places -= 1
            return {}
        from transformers.masking_utils import create_masks_for_generate

        self._set_lengths(0)
        # no mask: a model that is told so needs not ask the device whether the cache is empty
        embeddings = torch.empty((*self.input_ids.shape, 0), device=self.input_ids.device)
        config: Any = self.model.config
        masks = create_masks_for_generate(config, embeddings, None, None)
        return {"attention_mask": masks} if isinstance(masks, dict) else {}


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _held(layer: Any) -> list[torch.Tensor | None]:
    states = (getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states"))
    return [
        getattr(layer, "keys", None),
        getattr(layer, "values", None),
        *(s for held in states for s in held.values()),
    ]


def _zeros(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """Keys or values like these, [batch, heads, tokens, width], of so many tokens."""
    return tensor.new_zeros((*tensor.shape[:-2], tokens, tensor.shape[-1]))
