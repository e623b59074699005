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
from flopcast.microbench.recipe.settings import QUANTISED, Recipe
from flopcast.microbench.recipe.training_step import build_model

NEW_TOKENS = 128  # for which a static cache has places behind the context, as `generate` makes it for its new tokens


def build_inference(
    config: Mapping[str, Any], device: torch.device | str, recipe: Recipe, seed: int = 0
) -> InferenceStep:
    """Builds a call ready to run on `device`, of weights and tokens drawn there. Raises as `training_step.build`."""
    device = torch.device(device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision == "tf32"
    attention = attention_implementation(recipe.attention)
    with torch.device(device):
        model = build_for_inference(config, attention, recipe.precision, recipe.base_dtype)
    tokens = recipe.context if recipe.phase == "prefill" else 1
    ids = torch.randint(0, int(config["vocab_size"]), (recipe.batch, tokens), device=device)
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
        """The tensors that the cache holds now, each with its layer."""
        return [
            (tensor, index)
            for index, layer in enumerate(self.cache.layers if self.cache is not None else ())
            for tensor in (layer.keys, layer.values)
            if tensor is not None
        ]

    @property
    def lengths(self) -> list[tuple[torch.Tensor, int]]:
        """Of a static cache, how many tokens each layer holds, which is read on the device."""
        if self.cache is None or self.cache_kind == "dynamic":
            return []
        return [(layer.cumulative_length, index) for index, layer in enumerate(self.cache.layers)]

    def refill(self) -> None:
        """Makes the cache as it is before a call: empty, or with the keys and values of the context."""
        if self.cache_kind == "static":
            self._refill_static()
            return
        from transformers import DynamicCache

        config: Any = self.model.config
        self.cache = DynamicCache(config=config)
        if self.phase == "prefill":
            return
        heads, head_dim, dtype = self._keys()
        shape = (self.input_ids.shape[0], heads, self.context, head_dim)
        for index in range(config.num_hidden_layers):
            keys, values = (torch.zeros(shape, dtype=dtype, device=self.input_ids.device) for _ in range(2))
            self.cache.update(keys, values, index)
            layer = self.cache.layers[index]  # without the copies that `update` makes
            layer.keys, layer.values = keys, values

    def _refill_static(self) -> None:
        if self.cache is None:
            from transformers import StaticCache

            heads, head_dim, dtype = self._keys()
            config: Any = self.model.config
            self.cache = StaticCache(config=config, max_cache_len=self.context + NEW_TOKENS)
            self.cache.early_initialization(self.input_ids.shape[0], heads, head_dim, dtype, self.input_ids.device)
        for length, _ in self.lengths:
            length.fill_(0 if self.phase == "prefill" else self.context)
        self._places = NEW_TOKENS

    def _keys(self) -> tuple[int, int, torch.dtype]:
        """Heads of keys and values, their width and dtype."""
        config: Any = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if self.precision == "autocast-bf16":
            return heads, head_dim, torch.bfloat16
        return heads, head_dim, next(self.model.parameters()).dtype

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

        torch._foreach_zero_([length for length, _ in self.lengths])
        # no mask: a model that is told so needs not ask the device whether the cache is empty
        embeddings = torch.empty((*self.input_ids.shape, 0), device=self.input_ids.device)
        config: Any = self.model.config
        masks = create_masks_for_generate(config, embeddings, None, None)
        return {"attention_mask": masks} if isinstance(masks, dict) else {}
