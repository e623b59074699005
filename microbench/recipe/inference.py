"""Builds and runs one call of inference of a real model: a prompt at once (prefill), or one more token (decode).

The model's own call with transformers' own cache of keys and values: no sampling, no batching of requests, no queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flopcast.microbench.recipe.training_step import build_model

PHASES = ("prefill", "decode")


def build_inference(
    config: Mapping[str, Any],
    device: torch.device | str,
    *,
    phase: str,
    context: int,
    batch: int = 1,
    precision: str = "bf16",
    attention: str = "sdpa",
    base_dtype: str = "auto",
    seed: int = 0,
) -> InferenceStep:
    """Builds a call ready to run on `device`, of weights and tokens drawn there. Raises as `training_step.build`."""
    device = torch.device(device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    with torch.device(device):
        model = build_model(config, attention, precision, base_dtype=base_dtype).eval()
    tokens = context if phase == "prefill" else 1
    input_ids = torch.randint(0, int(config["vocab_size"]), (batch, tokens), device=device)
    return InferenceStep(model, input_ids, precision, device.type, phase, context)


@dataclass
class InferenceStep:
    """A causal language model and `batch` sequences of `context` tokens. `run()` is one call without a backward: of
    "prefill" the whole context into an empty cache, of "decode" one token more each, into a cache that holds it.

    As `generate` does, a prefill computes the logits of the last token alone, into a cache that each run makes anew. A
    run of a decode leaves a cache of one token more, from which the next goes on; `refill()` makes it as it was.
    """

    model: torch.nn.Module
    input_ids: torch.Tensor
    precision: str
    device_type: str  # "cpu" or "cuda"
    phase: str
    context: int
    optimizers: tuple[()] = ()
    cache: Any = field(default=None, repr=False)

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

    def refill(self) -> None:
        """Makes the cache as it is before a call: empty, or with the keys and values of the context."""
        from transformers import DynamicCache

        config: Any = self.model.config
        self.cache = DynamicCache(config=config)
        if self.phase == "prefill":
            return
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = next(self.model.parameters()).dtype
        if self.precision == "autocast-bf16":
            dtype = torch.bfloat16
        shape = (self.input_ids.shape[0], heads, self.context, head_dim)
        for index in range(config.num_hidden_layers):
            keys, values = (torch.zeros(shape, dtype=dtype, device=self.input_ids.device) for _ in range(2))
            self.cache.update(keys, values, index)
            layer = self.cache.layers[index]  # without the copies that `update` makes
            layer.keys, layer.values = keys, values

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
        if self.cache is None or self.phase == "prefill":
            self.refill()
        with torch.no_grad(), self.autocast():
            output = self.model(input_ids=self.input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits
        return logits
