"""Describes the models and steps that are run: the host calibration's tiny models and real training steps. Plain
data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("forward", "backward", "optimizer")
ADAPTERS = ("lora", "qlora")  # ways to fine-tune that train adapters alone
TORCH_MODES = {"compile": None, "compile-graphs": "reduce-overhead"}  # the `mode` of torch.compile
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
class HostPlan:
    """Models whose host cost is measured: `configs` by depth, of widths so small that the device keeps up. `model`
    names the family and what else changes what is launched, such as `mode`."""

    model: str
    configs: dict[int, dict[str, Any]]
    batch: int
    seq: int
    optimizer: str = "adamw"
    rounds: int = 5
    steps_per_round: int = 4
    mode: str = "eager"
    checkpoint: str = "none"
    finetune: str = "full"

    def row_key(self, depth: int, phase: str) -> str:
        """Key of the measurement row of one phase at one depth."""
        return f"host/{self.model}/depth{depth}/{phase}"


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One real step to run and to compare with its forecast.

    The model is a causal language model of the transformers `config`, or, where `module` is given, what the factory
    "package.module:function" returns for this `batch`. `matmul` and `attention` name the kernels that run the products
    and the attention: "torch" and "sdpa" (what torch picks), or those that `patches` puts in their place. `fused`
    "triton" means that a Qwen3 runs its norms, rope, activation and loss on the fused kernels. `phase` "prefill" or
    "decode": not a step of training but one call with `context` tokens of each sequence (`recipe.inference`);
    `cache`: which of its CACHES, "auto" the one that `cache_kind` says. `parallel`: the layout over several GPUs, as
    `recipe.layout` reads it.
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
    clip: float = 0.0
    finetune: str = "full"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    base_dtype: str = "auto"
    phase: str = "train"
    context: int = 0
    cache: str = "auto"
    module: str = ""
    group: str = "ladder"
    mode: str = "eager"
    parallel: str = "none"

    @property
    def key(self) -> str:
        """Key of the row that holds the step's times: a readable description of what was run."""
        tokens, what = (self.seq, self.optimizer) if self.phase == "train" else (self.context, self.phase)
        run = f"{self.batch}x{tokens}/{self.precision}/{what}/{self.attention}"
        run += "" if self.matmul == "torch" else f"/{self.matmul}"
        run += "" if self.accumulate == 1 else f"/accumulate{self.accumulate}"
        run += "" if self.checkpoint == "none" else f"/checkpoint-{self.checkpoint}"
        run += "" if self.fused == "none" else f"/fused-{self.fused}"
        run += "" if self.mode == "eager" else f"/{self.mode}"
        run += f"/clip{self.clip:g}" if self.clip else ""
        run += "" if self.finetune == "full" else f"/{self.finetune}"
        run += f"{self.lora_rank}-{self.lora_targets}" if self.finetune in ADAPTERS else ""
        run += "" if self.base_dtype == "auto" else f"/base-{self.base_dtype}"
        run += "" if self.cache == "auto" else f"/{self.cache}"
        run += "" if self.parallel == "none" else f"/{self.parallel}"
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


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that the config has: GPT-2 names its sizes differently."""
    return next((config[name] for name in names if name in config), None)


def cache_kind(cache: str, mode: str) -> str:
    """What `cache` stands for: "auto" is transformers' own choice, a cache that grows, and a static one where calls are
    compiled, which a growing one would have compiled anew for every token."""
    if cache != "auto":
        return cache
    return "dynamic" if mode == "eager" else "static"


def weights_dtype(base_dtype: str, finetune: str, precision: str) -> str:
    """What `base_dtype` stands for, "bf16" or "fp32": "auto" is bf16 under adapters, which train beside weights that
    need no more, and else as the precision has them."""
    if base_dtype != "auto":
        return base_dtype
    is_beside_adapters = finetune in ADAPTERS and precision == "autocast-bf16"
    return "bf16" if precision == "bf16" or is_beside_adapters else "fp32"
