"""What the host calibration runs: tiny models of two or more depths. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Models whose host cost is measured: `configs` by depth, so narrow that the device keeps up."""

    model: str
    configs: dict[int, dict[str, Any]]
    batch: int
    seq: int
    optimizer: str = "adamw"
    rounds: int = 5
    steps_per_round: int = 4

    def row_key(self, depth: int, phase: str) -> str:
        """Key of the measurement row of one phase at one depth."""
        return f"host/{self.model}/depth{depth}/{phase}"


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One real step to run and to compare with its forecast.

    What is run is a causal language model by the `config` of transformers, or, where `module` is given, what the
    factory "package.module:function" makes for this `batch`. `matmul` and `attention` name the kernels that run the
    products and the attention: "torch" and "sdpa" (what torch picks), or what `patches` puts in their place; `fused`
    "triton" that a Qwen3 runs its norms, rope, activation and loss on the fused kernels.
    """

    name: str
    config: dict[str, Any]
    batch: int = 4
    seq: int = 256
    precision: str = "autocast-bf16"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    matmul: str = "torch"
    accumulate: int = 1
    checkpoint: str = "none"
    fused: str = "none"
    module: str = ""
    group: str = "ladder"

    @property
    def key(self) -> str:
        """Key of the row that holds the step's times: what was run, readable."""
        run = f"{self.batch}x{self.seq}/{self.precision}/{self.optimizer}/{self.attention}"
        run += "" if self.matmul == "torch" else f"/{self.matmul}"
        run += "" if self.accumulate == 1 else f"/accumulate{self.accumulate}"
        run += "" if self.checkpoint == "none" else f"/checkpoint-{self.checkpoint}"
        run += "" if self.fused == "none" else f"/fused-{self.fused}"
        if self.module:
            return f"step/{self.name}/{self.module}/{run}"
        c = self.config
        kind = c.get("model_type", "qwen3")
        shape = "" if kind == "qwen3" else f"{kind}-"
        shape += f"w{_first(c, 'hidden_size', 'n_embd')}d{_first(c, 'num_hidden_layers', 'n_layer')}"
        shape += f"f{_first(c, 'intermediate_size', 'n_inner')}v{c.get('vocab_size')}"
        tied = int(bool(c.get("tie_word_embeddings")))
        heads = f"h{_first(c, 'num_attention_heads', 'n_head')}k{c.get('num_key_value_heads')}t{tied}"
        return f"step/{self.name}/{shape}{heads}/{run}"

    @property
    def has_triton(self) -> bool:
        """Whether kernels of Triton's are among those that run it."""
        return "triton" in (self.matmul, self.attention, self.fused)

    @property
    def kernels_key(self) -> str:
        """Key of the row that holds the step's kernels."""
        return self.key.replace("step/", "step_kernels/", 1)

    @property
    def estimate_key(self) -> str:
        """Key of the row that holds what torch's own estimator says of the step."""
        return self.key.replace("step/", "step_estimate/", 1)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """The first field that the config has: GPT-2 names its sizes differently."""
    return next((config[name] for name in names if name in config), None)
