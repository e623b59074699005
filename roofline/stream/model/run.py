"""How a step is run: batch, precision, optimizer, mode, backends. `Traced` is the part that a trace depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from flopcast.errors import UsageError
from flopcast.roofline.stream.model.models import EXPERTS, MOST_LAYERS, Config, check_config, depth_of

if TYPE_CHECKING:
    from flopcast.microbench.recipe.layout import Layout

# The dtype whose peak rate a step is compared with.
PEAK_OF = {"autocast-bf16": "bf16", "autocast-fp16": "fp16", "bf16": "bf16", "tf32": "tf32", "fp32": "fp32"}

# Far above anything trained, and low enough that tensor sizes fit into 64 bits.
MOST = {"batch": 2**20, "seq": 2**24, "accumulate": 1024}
MOST_TOKENS = 2**30  # per micro-batch
MODES = ("eager", "compile", "compile-graphs")
# Other values of torch.compile's `mode` and `backend`, and why they are not modelled.
_ANY_BACKEND = "; of torch.compile only its own backend, inductor, is modelled, since what it generates can be read"
_TUNED = "; max-autotune chooses kernels by timing them while it compiles, which takes the GPU itself"
_WHY_NOT = {
    "max-autotune": _TUNED, "max-autotune-no-cudagraphs": _TUNED,
    "default": "; torch's mode 'default' is --mode compile", "reduce-overhead": "; torch's 'reduce-overhead' is "
    "--mode compile-graphs",
    "fp8": "; torch has products in fp8 (torch._scaled_mm) but no layer that trains in it: the scales and casts are "
    "torchao's or Transformer Engine's, whose kernels no profile holds. Its roof: `flopcast roofline`",
    "fp16": "; torch trains fp16 under autocast with a gradient scaler: autocast-fp16",
    "bf16-autocast": "; it is autocast-bf16", "fp16-autocast": "; it is autocast-fp16",
}  # fmt: skip
PRECISIONS = tuple(PEAK_OF)
ONE_GPU = "none"  # in place of a layout over several
HOST_GPUS = 8  # of a host where nothing is said
PARALLEL_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum")
OPTIMIZERS = ("adamw", "adamw-fused", "adamw8bit", "sgd", "sgd-momentum", "adafactor", "adafactor-foreach", "muon")
MATMULS = ("torch", "triton", "best")
ATTENTIONS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "triton", "best")
PHASES = ("train", "prefill", "decode")
CACHES = ("auto", "dynamic", "static")
FINETUNES = ("full", "lora", "qlora")  # and last=N
QUANTISED = ("fp8", "int8", "int4")  # weights of inference alone
BASE_DTYPES = ("auto", "fp32", "bf16", *QUANTISED)
# The compute capability from which torch multiplies such weights: e4m3 operands, products in bf16.
LEAST_CAPABILITY = {"fp8": (8, 9), "int4": (8, 0)}
MOST_RANK = 65536
FUSED = ("none", "triton", "patch")  # values of `predict --fused`


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The settings that determine the op stream, besides the config.

    `device`: "cuda" or "cpu"; of a compiled step with what decides its kernels, compute capability and number of SMs:
    "cuda 9.0 132". `parallel` and `rank`: of several GPUs which, laid out how, as `Layout` writes it. `attention`:
    "triton" or "sdpa", which matters to models with sliding windows alone: torch's takes a mask for them.
    """

    batch: int = 4
    seq: int = 256
    precision: str = "autocast-bf16"
    optimizer: str = "adamw"
    device: str = "cuda"
    accumulate: int = 1
    checkpoint: str = "none"
    fused: str = "none"
    clip: float = 0.0
    mode: str = "eager"
    finetune: str = "full"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    base_dtype: str = "auto"  # that of the precision: bf16 with precision bf16, else fp32
    phase: str = "train"
    context: int = 0
    cache: str = "dynamic"
    parallel: str = ONE_GPU
    rank: int = 0
    attention: str = "sdpa"

    @property
    def layout(self) -> Layout:
        return layout_of(self.parallel)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How the step is run. Checked by `check`.

    `batch` sequences of `seq` tokens are a micro-batch, `accumulate` micro-batches a step. A step's `flops_counted` is
    the FLOPs of the model over all micro-batches, without what `checkpoint` "full" recomputes (which the breakdown
    includes). `clip`: the norm to which the gradients are clipped; 0 for none. `finetune`: what is trained,
    full, lora, qlora or last=N; `base_dtype`: that of the weights, by default bf16 under adapters and else the
    precision's; of inference also one of QUANTISED, for the weights of linear layers but the output one.
    `phase` "prefill" or "decode": a step is one call of inference with `context` tokens a sequence; `seq` is not used;
    `cache`: which cache of keys and values it has, by default transformers' own choice (`plans.cache_kind`).
    `imbalance`: of a model with experts the tokens of the fullest over the mean, with ep those of the fullest rank.
    `parallel`: how the step is laid out over several GPUs, as `Layout.parse` reads it; `batch` is a data-parallel
    rank's. They are evenly on `nodes` hosts, 0 for as few as hold HOST_GPUS each; `link` joins those of a host, by
    default the GPU's usual one.
    """

    batch: int = 4
    seq: int = 256
    accumulate: int = 1
    checkpoint: str = "none"
    precision: str = "autocast-bf16"
    optimizer: str = "adamw"
    mode: str = "eager"
    matmul: str = "torch"
    attention: str = "sdpa"
    fused: str = "none"
    clip: float = 0.0
    finetune: str = "full"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    base_dtype: str = "auto"
    phase: str = "train"
    context: int = 0
    cache: str = "auto"
    imbalance: float = 1.0
    parallel: str = ONE_GPU
    nodes: int = 0
    link: str = "auto"

    @property
    def tokens(self) -> int:
        """Tokens per step, of all ranks; of inference those that a call takes."""
        return self.batch * self.tokens_each * self.accumulate * self.layout.data

    @property
    def layout(self) -> Layout:
        """Raises UsageError where `parallel` is none."""
        return layout_of(self.parallel)

    @property
    def is_parallel(self) -> bool:
        return self.parallel != ONE_GPU

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

    def check(self) -> None:
        """Raises UsageError for what is invalid or not modelled yet."""
        for name, most in MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise UsageError(f"{name} is {value}: valid is an integer of at least 1, at most {most}")
        if self.batch * self.seq > MOST_TOKENS:
            raise UsageError(
                f"batch x seq is {self.batch} x {self.seq} tokens: at most {MOST_TOKENS} make a micro-batch; lower one "
                "of the two"
            )
        valid = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "mode": MODES, "matmul": MATMULS,
                 "attention": ATTENTIONS, "checkpoint": ("none", "full"), "fused": FUSED, "cache": CACHES}  # fmt: skip
        for name, choices in valid.items():
            value = getattr(self, name)
            if value not in choices:
                why = why_not(value) if name == "mode" else _WHY_NOT.get(value, "")
                raise UsageError(f"{name} {value!r}: valid are {', '.join(choices)}{why}")
        if not 0 <= self.clip < inf:
            raise UsageError(f"clip is {self.clip:g}: valid is a norm above 0, or 0 for no clipping")
        if not 1 <= self.imbalance < inf:
            raise UsageError(
                f"imbalance is {self.imbalance:g}: valid are 1, where all experts get as many tokens, or more: those "
                "of the fullest over the mean"
            )
        self._check_finetune()
        self._check_phase()
        self._check_quantised()
        self._check_scaled()
        if self.mode != "eager":
            self._check_compiled()
        self._check_parallel()

    def _check_scaled(self) -> None:
        """Raises UsageError for what is not modelled of a step whose gradients are scaled."""
        if self.precision != "autocast-fp16":
            return
        for name in ("mode", "phase", "parallel", "fused"):
            if (value := getattr(self, name)) != getattr(Run, name):
                raise UsageError(
                    f"{name} {value} with precision autocast-fp16, whose gradients a GradScaler scales: not modelled "
                    "yet; use autocast-bf16, or leave one of the two out"
                )

    def _check_quantised(self) -> None:
        """Raises UsageError for weights of few bits where nothing is forecast with them."""
        if self.base_dtype not in QUANTISED:
            return
        told = f"base_dtype {self.base_dtype!r}"
        if self.phase == "train":
            raise UsageError(
                f"{told}: torch multiplies such weights without a backward; give --phase prefill or decode with it, "
                "train on fp32 or bf16"
            )
        if self.precision != "bf16":
            raise UsageError(f"{told} with precision {self.precision!r}: its products give bf16; use --precision bf16")
        if self.matmul != Run.matmul:
            raise UsageError(
                f"{told} with matmul {self.matmul!r}: of such weights torch's own products alone are modelled; leave "
                "one of the two out"
            )

    def _check_compiled(self) -> None:
        if self.optimizer == "adamw8bit":
            raise UsageError(
                f"optimizer 'adamw8bit' with mode {self.mode!r}: it is modelled beside eager steps alone; use --mode "
                "eager, or adamw-fused"
            )
        for name, choice, why in (
            ("fused", "none", "compiled code fuses these operations itself, and leaves custom ones as they are"),
            ("matmul", "torch", "compiled code calls cuBLAS for its products"),
            ("attention", "sdpa", "compiled code calls what torch picked while it compiled"),
            ("finetune", "full", "compiled steps that train a part of a model are not modelled yet"),
            ("base_dtype", ("auto", *QUANTISED), "compiled steps on weights of another dtype are not modelled yet"),
        ):
            if (value := getattr(self, name)) not in (choice if isinstance(choice, tuple) else (choice,)):
                raise UsageError(f"{name} {value!r} with mode {self.mode!r}: {why}; leave one of the two out")

    def _check_parallel(self) -> None:
        """Raises UsageError for what is not valid or not modelled of several GPUs."""
        if not self.is_parallel:
            for name in ("nodes", "link"):
                if (value := getattr(self, name)) != getattr(Run, name):
                    raise UsageError(f"{name} {value} of a step on one GPU: give --parallel with it, or leave it out")
            return
        self.layout.check_built()
        world = self.layout.world
        if self.nodes and (not 1 <= self.nodes <= world or world % self.nodes):
            valid = [nodes for nodes in range(1, min(world, 4096) + 1) if world % nodes == 0]
            raise UsageError(
                f"nodes is {self.nodes}: it does not divide the {world} GPUs of parallel {self.parallel}; valid are "
                f"{', '.join(map(str, valid))}"
            )
        if self.optimizer not in PARALLEL_OPTIMIZERS:
            raise UsageError(
                f"optimizer {self.optimizer!r} with parallel {self.parallel}: not modelled yet on several GPUs; valid "
                f"are {', '.join(PARALLEL_OPTIMIZERS)}"
            )
        self._check_compiled_parallel()
        for name in ("phase", "finetune", "base_dtype", "fused", "clip"):
            if (value := getattr(self, name)) != getattr(Run, name):
                raise UsageError(
                    f"{name} {value} with parallel {self.parallel}: not modelled yet on several GPUs; leave one of the "
                    "two out"
                )

    def _check_compiled_parallel(self) -> None:
        """Raises UsageError for a compiled step on several GPUs that is not modelled."""
        layout, kinds = self.layout, ("ddp=N", "zero1=N", "zero2=N", "fsdp=N", "hsdp=RxS")
        if self.mode == "compile" and layout.world > layout.data:
            raise UsageError(
                f"mode compile with parallel {self.parallel}: what torch compiles of layers, sequences or experts that "
                f"are divided is not modelled yet; valid with it are {', '.join(kinds)}, or use --mode eager"
            )
        if self.mode == "compile-graphs":
            raise UsageError(
                f"mode compile-graphs with parallel {self.parallel}: a CUDA graph reads and writes fixed memory, and "
                "FSDP gathers parameters into memory that it gives back, DistributedDataParallel puts gradients into "
                "buckets behind it; what torch then copies or captures again is not modelled; use --mode compile"
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

    def _check_phase(self) -> None:
        """Raises UsageError for what is not valid of inference."""
        if self.phase not in PHASES:
            raise UsageError(f"phase {self.phase!r}: valid are {', '.join(PHASES)}")
        if self.phase == "train":
            if self.context:
                raise UsageError(f"context {self.context} without a phase: give --phase prefill or decode with it")
            if self.cache != Run.cache:
                raise UsageError(f"cache {self.cache!r} without a phase: give --phase prefill or decode with it")
            return
        if self.cache == "dynamic" and self.mode != "eager":
            raise UsageError(
                f"cache 'dynamic' with mode {self.mode!r}: it grows with every token, for which torch would compile "
                "anew; use --cache static, or leave one of the two out"
            )
        if not 1 <= self.context <= MOST["seq"]:
            raise UsageError(
                f"context is {self.context}: phase {self.phase} needs --context, the tokens of a sequence, from 1 to "
                f"{MOST['seq']}"
            )
        if self.batch * self.context > MOST_TOKENS:
            raise UsageError(
                f"batch x context is {self.batch} x {self.context} tokens: valid are {MOST_TOKENS} at most"
            )
        for name in ("accumulate", "checkpoint", "optimizer", "fused", "clip", "finetune"):
            if (value := getattr(self, name)) != getattr(Run, name):
                raise UsageError(f"{name} {value} with phase {self.phase}, which trains nothing: leave {name} out")

    def _check_finetune(self) -> None:
        """Raises UsageError for what is not valid of fine-tuning."""
        from flopcast.microbench.recipe.plans import ADAPTERS  # which `flopcast --help` does without

        count = self.finetune.removeprefix("last=")
        is_last = self.finetune.startswith("last=") and count.isdecimal() and 1 <= int(count) <= MOST_LAYERS
        if self.finetune == "qlora" and self.precision != "autocast-bf16":
            raise UsageError(
                f"finetune 'qlora' with precision {self.precision!r}: its 4-bit weights are unpacked to bf16; use "
                "--precision autocast-bf16"
            )
        if self.finetune not in FINETUNES and not is_last:
            raise UsageError(f"finetune {self.finetune!r}: valid are full, lora, qlora and last=N, N layers from 1 on")
        if self.base_dtype not in BASE_DTYPES:
            raise UsageError(f"base_dtype {self.base_dtype!r}: valid are {', '.join(BASE_DTYPES)}")
        if self.base_dtype == "fp32" and self.precision == "bf16":
            raise UsageError("base_dtype 'fp32' with precision 'bf16', which keeps weights in bf16: leave one out")
        if not 1 <= self.lora_rank <= MOST_RANK:
            raise UsageError(f"lora_rank is {self.lora_rank}: valid is an integer of at least 1, at most {MOST_RANK}")
        for name in ("lora_rank", "lora_targets"):
            if self.finetune not in ADAPTERS and getattr(self, name) != getattr(Run, name):
                raise UsageError(f"{name} {getattr(self, name)} with finetune {self.finetune}: it is of lora and qlora")
        if not all(part.strip() for part in self.lora_targets.split(",")):
            raise UsageError(
                f"lora_targets {self.lora_targets!r}: valid are all-linear, or names of linear layers with commas "
                "between, such as q_proj,v_proj"
            )
        if self.fused == "patch":
            self._check_patched()
        if self.finetune in ADAPTERS and self.fused != "none":
            raise UsageError(
                f"fused {self.fused!r} with finetune {self.finetune}: the fused kernels know no adapters; leave one out"
            )

    def _check_patched(self) -> None:
        for name, valid, why in (
            ("attention", "triton", "a patched model runs on the Triton attention"),
            ("matmul", "torch", "the layers of a patched model that are one node have torch's products"),
            ("parallel", ONE_GPU, "patched steps on one GPU alone are modelled"),
            ("phase", "train", "it is of training steps"),
        ):
            if (value := getattr(self, name)) != valid:
                raise UsageError(f"fused 'patch' with {name} {value!r}: {why}; give {name} {valid!r}")

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
        if self.is_parallel and device == "cpu":
            raise UsageError(f"parallel {self.parallel} on processors: steps on several GPUs alone are modelled")
        shared = {name: value for name, value in vars(self).items() if name in Traced.__dataclass_fields__}
        from flopcast.microbench.recipe.plans import cache_kind, weights_dtype  # which `flopcast --help` does without

        usual = weights_dtype("auto", "full", self.precision)
        base = weights_dtype(self.base_dtype, self.finetune, self.precision)
        shared["seq"] = self.tokens_each
        shared["base_dtype"] = "auto" if base == usual else base
        shared["cache"] = "dynamic" if self.phase == "train" else cache_kind(self.cache, self.mode)
        shared["parallel"] = str(self.layout) if self.is_parallel else ONE_GPU
        shared["attention"] = "triton" if self.attention == "triton" and not self.is_parallel else "sdpa"
        return Traced(**shared, device=device)


def why_not(mode: str) -> str:
    """Why a mode or a backend of torch.compile is not modelled, as the end of a sentence."""
    return _WHY_NOT.get(mode, _ANY_BACKEND)


def layout_of(parallel: str) -> Layout:
    """Reads `Run.parallel`. Raises UsageError."""
    from flopcast.microbench.recipe.layout import Layout  # which `flopcast --help` does without

    return Layout() if parallel == ONE_GPU else Layout.parse(parallel)


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
