"""How a step is run: what is forecast of a `Recipe`, and `Traced`, on what its op stream depends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from flopcast.bounds import Valid
from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import EXPERTS, ONE_GPU, PRECISIONS, QUANTISED, Recipe, setting, usual_dtype
from flopcast.roofline.stream.model.combinations import check_together
from flopcast.roofline.stream.model.models import Config, check_config, depth_of

# The dtype whose peak rate a step is compared with.
PEAK_OF = {precision: precision.removeprefix("autocast-") for precision in PRECISIONS}
HOST_GPUS = 8  # of a host where nothing is said
# The compute capability from which torch multiplies such weights: e4m3 operands, products in bf16.
LEAST_CAPABILITY = {"fp8": (8, 9), "int4": (8, 0)}


@dataclass(frozen=True, kw_only=True)
class Traced(Recipe):
    """The settings that determine the op stream, besides the config: what does not stands at its default.

    `device`: "cuda" or "cpu"; of a compiled step with what decides its kernels, compute capability and number of SMs:
    "cuda 9.0 132". `parallel` and `rank`: of several GPUs which, laid out how, as `Layout` writes it. `attention`:
    "triton" or "sdpa", which matters to models with sliding windows alone: torch's takes a mask for them. `base_dtype`
    "auto": that of the precision, bf16 with precision bf16, else fp32.
    """

    cache: str = "dynamic"
    device: str = "cuda"
    rank: int = 0

    @property
    def weights_dtype(self) -> str:
        """What `base_dtype` stands for here, adapters or not: `Run.traced_on` has resolved what they change."""
        return usual_dtype(self.precision) if self.base_dtype == "auto" else self.base_dtype


@dataclass(frozen=True, kw_only=True)
class Run(Recipe):
    """How the step is run. Checked by `check`.

    A step's `flops_counted` is the FLOPs of the model over all micro-batches, without what `checkpoint` "full"
    recomputes (which the breakdown includes).
    """

    imbalance: float = field(
        default=1.0,
        metadata=setting(
            "Of a model with experts: tokens of the fullest expert over the mean, with --parallel ep=N of the fullest "
            "GPU; 1: balanced.",
            Valid(
                lambda over_mean: 1 <= over_mean < inf,
                "are 1, where all experts get as many tokens, or more: those of the fullest over the mean",
            ),
        ),
    )
    nodes: int = field(
        default=0, metadata=setting("Hosts over which the GPUs of --parallel lie evenly; 0: as few as hold 8 each.")
    )
    link: str = field(
        default="auto",
        metadata=setting(
            "Link between the GPUs of a host: one of `flopcast gpus --links`, or a file of `flopcast fit`. auto: the "
            "GPU's usual one."
        ),
    )

    @property
    def tokens(self) -> int:
        """Tokens per step, of all ranks; of inference those that a call takes."""
        return self.batch * self.tokens_each * self.accumulate * self.layout.data

    @property
    def hosts(self) -> int:
        world = self.layout.world
        return self.nodes or next(n for n in range(-(-world // HOST_GPUS), world + 1) if world % n == 0)

    @property
    def tokens_each(self) -> int:
        """Tokens that a sequence has in a step: of a decode one, of a prefill the context."""
        return {"train": self.seq, "prefill": self.context, "decode": 1}[self.phase]

    @property
    def matrix_dtype(self) -> str:
        """The dtype at whose peak rate most products of a call run; "" for a precision of a module's own."""
        return "fp8" if self.base_dtype == "fp8" else PEAK_OF.get(self.precision, "")

    def to_json(self) -> dict[str, Any]:
        """The settings as files name them and in their order: how the step is laid out stands last."""
        record = asdict(self)
        last = {name: record.pop(name) for name in ("parallel", "nodes", "link")}
        return {**record, **last}

    def check(self) -> None:
        """Raises UsageError for what is invalid or not modelled yet."""
        self.check_each()
        check_together(self)
        if self.is_parallel:
            self._check_nodes()
            return
        for name in ("nodes", "link"):
            if name in (unusual := self.unusual):
                raise UsageError(
                    f"{name} {unusual[name]} of a step on one GPU: give --parallel with it, or leave it out"
                )

    def checked(self) -> Run:
        """Returns the run itself. Raises UsageError as `check` does."""
        self.check()
        return self

    def _check_nodes(self) -> None:
        world = self.layout.world
        if self.nodes and (not 1 <= self.nodes <= world or world % self.nodes):
            valid = [nodes for nodes in range(1, min(world, 4096) + 1) if world % nodes == 0]
            raise UsageError(
                f"nodes is {self.nodes}: it does not divide the {world} GPUs of parallel {self.parallel}; valid are "
                f"{', '.join(map(str, valid))}"
            )

    def device_of(self, device: Mapping[str, Any]) -> str:
        """Returns what decides the op stream of what a profile says of its device, as `Traced.device`. Raises
        UsageError where that GPU multiplies no weights like the run's."""
        least, capability = LEAST_CAPABILITY.get(self.base_dtype), device.get("capability")
        if least and capability and tuple(capability) < least:
            raise UsageError(
                f"base_dtype {self.base_dtype!r} on {device.get('name', 'a GPU')} of compute capability "
                f"{'.'.join(map(str, capability))}: torch multiplies such weights from {'.'.join(map(str, least))} on; "
                "use int8, which is cast to bf16, or bf16"
            )
        return str(device["type"]) if self.mode == "eager" else chip_of(device)

    def traced_on(self, device: str) -> Traced:
        """Returns the settings of the run that determine the op stream on `device`, which `device_of` or `chip_of`
        makes. Raises UsageError for a compiled step on a device that is no GPU."""
        if self.mode == "eager":
            device = device.partition(" ")[0]
        elif " " not in device:
            raise UsageError(
                f"mode {self.mode!r} on {device!r}: compiled steps are modelled on GPUs whose compute capability and "
                "number of SMs are known; use --mode eager"
            )
        if self.base_dtype in QUANTISED and device == "cpu":
            raise UsageError(
                f"base_dtype {self.base_dtype!r} on processors, for which torch has other products of such weights: "
                "not modelled; use bf16"
            )
        if device == "cpu" and (self.finetune == "qlora" or self.optimizer == "adamw8bit"):
            raise UsageError(
                "finetune qlora and optimizer adamw8bit on processors, where bitsandbytes runs other kernels: not "
                "modelled; use lora, and adamw"
            )
        if device == "cpu" and self.optimizer == "adamw-triton":
            raise UsageError(
                "optimizer adamw-triton on processors: its kernel runs on a CUDA GPU alone; use adamw or adamw-fused"
            )
        if self.is_parallel and device == "cpu":
            raise UsageError(f"parallel {self.parallel} on processors: steps on several GPUs alone are modelled")
        usual = usual_dtype(self.precision)
        different = {
            "seq": self.tokens_each,
            "matmul": Recipe.matmul,
            "base_dtype": "auto" if self.weights_dtype == usual else self.weights_dtype,
            "cache": "dynamic" if self.phase == "train" else self.cache_kind,
            "parallel": str(self.layout) if self.is_parallel else ONE_GPU,
            "attention": "triton" if self.attention == "triton" and not self.is_parallel else "sdpa",
        }
        return Traced(**{**self.settings, **different}, device=device)


def chip_of(device: Mapping[str, Any]) -> str:
    """Returns the kind of a profile's device, of a GPU with its compute capability and number of SMs, where they are
    known: "cuda 9.0 132"."""
    kind, capability, sm_count = (device.get(name) for name in ("type", "capability", "sm_count"))
    if kind != "cuda" or not capability or not sm_count:
        return str(kind)
    return f"{kind} {capability[0]}.{capability[1]} {sm_count}"


def check_step(config: Config, traced: Traced) -> None:
    """Raises UsageError for an invalid config, and for a step that this model cannot run."""
    check_config(config)
    if traced.fused != "none" and config.get("model_type") != "qwen3":
        raise UsageError(
            f"fused {traced.fused!r} of a {config.get('model_type')}: the fused kernels are patched into Qwen3 alone "
            "(model_type 'qwen3'); leave --fused out for other models"
        )
    traced.layout.check_not_own()
    if traced.parallel != ONE_GPU:
        traced.layout.check(seq=traced.seq, accumulate=traced.accumulate, **_divided_sizes(config))
    positions = config.get("n_positions")
    seq = max(traced.seq, traced.context + (traced.phase == "decode"))
    if isinstance(positions, int) and seq > positions:
        raise UsageError(f"seq is {seq}: this model has {positions} positions (n_positions), use at most that")


def _divided_sizes(config: Config) -> dict[str, int]:
    """Returns the sizes that a layout divides, as `Layout.check` names them; those that the config gives."""
    fields = {
        "heads": ("num_attention_heads", "n_head"), "kv_heads": ("num_key_value_heads",), "ffn": ("intermediate_size",),
        "experts": EXPERTS,
    }  # fmt: skip
    found = {name: next((config[key] for key in keys if config.get(key)), 0) for name, keys in fields.items()}
    return {"layers": depth_of(config), **found}


def run_from(options: Mapping[str, Any]) -> Run:
    """Makes a Run from options by name; missing ones take their defaults."""
    known = {name: options[name] for name in Run.__dataclass_fields__ if options.get(name) is not None}
    return Run(**known)
