"""Describes the models and steps that are run: the host calibration's tiny models and real training steps. Plain
data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flopcast.microbench.recipe.settings import ADAPTERS, Recipe

PHASES = ("forward", "backward", "optimizer")
_MODE = re.compile(r"-(compile(?:-graphs)?)/(?:process\d+/)?depth\d+/")
_PROCESS = re.compile(r"/process(\d+)(?=/depth)")


def of_process(key: str, process: int) -> str:
    """Key of a row of the host calibration that one of several processes measured."""
    return key.replace("/depth", f"/process{process}/depth", 1)


def without_process(key: str) -> tuple[str, int | None]:
    """A row's key as a single process writes it, and the number of its process, if it has one."""
    found = _PROCESS.search(key)
    return (key, None) if found is None else (_PROCESS.sub("", key), int(found[1]))


def mode_of(key: str) -> str:
    """The mode of the tiny model that a row of the host calibration is of."""
    found = _MODE.search(key)
    return found[1] if found else "eager"


@dataclass(frozen=True, kw_only=True)
class HostPlan(Recipe):
    """Models whose host cost is measured: `configs` by depth, of widths so small that the device keeps up. `model`
    names the family and what else changes what is launched, such as `mode`. Adapters stand beside weights in fp32."""

    model: str
    configs: dict[int, dict[str, Any]]
    rounds: int = 5
    steps_per_round: int = 4
    base_dtype: str = "fp32"

    def row_key(self, depth: int, phase: str) -> str:
        """Key of the measurement row of one phase at one depth."""
        return f"host/{self.model}/depth{depth}/{phase}"


@dataclass(frozen=True, kw_only=True)
class StepPlan(Recipe):
    """One real step to run and to compare with its forecast.

    The model is a causal language model of the transformers `config`, or, where `module` is given, what the factory
    "package.module:function" returns for this `batch`.
    """

    name: str
    config: dict[str, Any]
    module: str = ""
    group: str = "ladder"

    @property
    def key(self) -> str:
        """Key of the row that holds the step's times: a readable description of what was run."""
        tokens, what = (self.seq, self.optimizer) if self.phase == "train" else (self.context, self.phase)
        words = {
            "matmul": self.matmul, "accumulate": f"accumulate{self.accumulate}",
            "checkpoint": f"checkpoint-{self.checkpoint}", "fused": f"fused-{self.fused}", "mode": self.mode,
            "clip": f"clip{self.clip:g}",
            "finetune": self.finetune + f"{self.lora_rank}-{self.lora_targets}" * (self.finetune in ADAPTERS),
            "base_dtype": f"base-{self.base_dtype}", "cache": self.cache, "parallel": self.parallel,
        }  # fmt: skip
        unusual = {name: f"{name}-{value}" for name, value in self.unusual.items() if name not in _IN_KEY}
        more = [words.get(name, unusual[name]) for name in {**words, **unusual} if name in unusual]
        run = "/".join([f"{self.batch}x{tokens}", self.precision, what, self.attention, *more])
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
    def sizes(self) -> dict[str, int]:
        """What the module's factory is given, by the names of the parameters that it may have."""
        return {"batch": self.batch, **({"seq": self.seq} if self.seq > 1 else {})}

    @property
    def has_triton(self) -> bool:
        """Whether the step runs any of Triton's kernels."""
        return "triton" in (self.matmul, self.attention, self.fused)

    @property
    def kernels_key(self) -> str:
        """Key of the row that holds the step's kernels."""
        return self.key.replace("step/", "step_kernels/", 1)

    @property
    def parallel_key(self) -> str:
        """Key of the row that holds the times of a step on several GPUs."""
        return f"parallel_{self.key}"

    @property
    def parallel_kernels_key(self) -> str:
        """Key of the row that says how the GPUs spent it."""
        return f"parallel_{self.kernels_key}"

    @property
    def estimate_key(self) -> str:
        """Key of the row that holds the step time of torch's own estimator."""
        return self.key.replace("step/", "step_estimate/", 1)


# Settings that a step's key says otherwise.
_IN_KEY = ("batch", "seq", "context", "precision", "optimizer", "phase", "attention", "lora_rank", "lora_targets")


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that the config has: GPT-2 names its sizes differently."""
    return next((config[name] for name in names if name in config), None)
