"""One training step of a real model, as it is forecast and as it is run.

The same recipe serves the tracer (fake tensors), the host calibration (tiny widths) and the validation
(real runs), so that the three speak of the same step: fp32 weights, autocast to bf16, `sdpa` attention,
`use_cache=False`, `labels=input_ids`, `zero_grad(set_to_none=True)`, no clipping, no checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

PRECISIONS = ("autocast-bf16", "bf16", "tf32", "fp32")
OPTIMIZERS = ("adamw", "adamw-fused")

# torch's own default learning rate; its value does not change what is launched.
LEARNING_RATE = 1e-3


@dataclass
class TrainingStep:
    """A model, its optimizer and one batch. `run()` is one step; the phases can be run one by one."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    input_ids: torch.Tensor
    precision: str
    device_type: str  # "cpu" or "cuda"

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "autocast-bf16":
            return torch.autocast(self.device_type, dtype=torch.bfloat16)
        return nullcontext()

    @property
    def counts_on_host(self) -> bool:
        """Whether the optimizer's step counters lie in host memory: so with AdamW on CUDA unless fused."""
        group = self.optimizer.param_groups[0]
        return self.device_type == "cuda" and not (group.get("fused") or group.get("capturable"))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self) -> torch.Tensor:
        with self.autocast():
            loss: torch.Tensor = self.model(
                input_ids=self.input_ids, labels=self.input_ids, use_cache=False
            ).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def run(self) -> torch.Tensor:
        self.zero_grad()
        loss = self.forward()
        self.backward(loss)
        self.optimizer_step()
        return loss.detach()


def build_model(
    config: Mapping[str, Any], attention: str = "sdpa", precision: str = "autocast-bf16"
) -> torch.nn.Module:
    """A causal language model from the fields of a transformers config.json, on the default device.

    Weights are fp32, but for precision "bf16". A built model is not cast: fake tensors cannot be, and tables that
    transformers keeps in fp32 (rotary frequencies) would be too.
    Raises ValueError when transformers does not know the `model_type` or refuses a field.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        name: value for name, value in config.items() if name not in ("architectures", "dtype", "torch_dtype")
    }
    transformers_config = AutoConfig.for_model(**fields)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        transformers_config,
        attn_implementation=attention,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
    )
    model.train()
    return model


def make_optimizer(
    model: torch.nn.Module, optimizer: str = "adamw", foreach: bool | None = None
) -> torch.optim.Optimizer:
    """AdamW: "adamw" is torch's default on the device (foreach on CUDA, a loop on the CPU), or "adamw-fused".

    `foreach=True` asks for CUDA's default on any device: the tracer needs it.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r}: valid are {', '.join(OPTIMIZERS)}")
    fused = True if optimizer == "adamw-fused" else None
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=fused, foreach=None if fused else foreach
    )


def build(
    config: Mapping[str, Any],
    device: torch.device | str,
    *,
    batch: int = 4,
    seq: int = 256,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    attention: str = "sdpa",
    seed: int = 0,
) -> TrainingStep:
    """A step ready to run on `device`, weights drawn there, tokens from torch.randint.

    Raises ValueError for an unknown precision or optimizer, torch.OutOfMemoryError when it does not fit.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: valid are {', '.join(PRECISIONS)}")
    device = torch.device(device)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    with torch.device(device):
        model = build_model(config, attention, precision)
    vocabulary = int(config["vocab_size"])
    input_ids = torch.randint(0, vocabulary, (batch, seq), device=device)
    return TrainingStep(model, make_optimizer(model, optimizer), input_ids, precision, device.type)
