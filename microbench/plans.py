"""What the host calibration runs: tiny models of two or more depths. Plain data."""

from __future__ import annotations

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
    """One real step to run and to compare with its forecast."""

    name: str
    config: dict[str, Any]
    batch: int = 4
    seq: int = 256
    precision: str = "autocast-bf16"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    group: str = "ladder"

    @property
    def key(self) -> str:
        """Key of the row that holds the step's times: what was run, readable."""
        c = self.config
        shape = f"w{c.get('hidden_size')}d{c.get('num_hidden_layers')}"
        shape += f"f{c.get('intermediate_size')}v{c.get('vocab_size')}"
        tied = int(bool(c.get("tie_word_embeddings")))
        heads = f"h{c.get('num_attention_heads')}k{c.get('num_key_value_heads')}t{tied}"
        run = f"{self.batch}x{self.seq}/{self.precision}/{self.optimizer}/{self.attention}"
        return f"step/{self.name}/{shape}{heads}/{run}"

    @property
    def kernels_key(self) -> str:
        """Key of the row that holds the step's kernels."""
        return self.key.replace("step/", "step_kernels/", 1)
