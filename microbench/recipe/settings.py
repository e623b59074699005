"""The settings of a step, apart from the model and the GPU: each is declared once, with its default, what is valid and
what it means.

    accumulate: Size = field(default=1, metadata=setting("Micro-batches per step.", range(1, 1025)))

What is run, traced, measured or forecast is a `Recipe` with fields of its own beside these: `plans.StepPlan`,
`plans.HostPlan`, and `Run` and `Traced` of `roofline.stream.model.run`. An option of the command line, a column of
`flopcast sweep` and the key of a stored stream follow from the declaration. Without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any

from flopcast.bounds import Count, NonNegative, Size, Valid
from flopcast.errors import UsageError

if TYPE_CHECKING:
    from flopcast.microbench.recipe.layout import Layout

Choices = Mapping[str, str] | tuple[str, ...]  # a mapping holds words for the help text

# Far above anything trained, and low enough that tensor sizes fit into 64 bits.
MOST_SEQ, MOST_TOKENS = 2**24, 2**30  # of tokens in a micro-batch
MOST_LAYERS = 1_000  # the deepest published have 126; an op stream of a million layers would fill memory
PRECISIONS = {"autocast-bf16": "", "autocast-fp16": "with a GradScaler", "bf16": "", "tf32": "", "fp32": ""}
OPTIMIZERS = {
    "adamw": "torch's default, foreach on CUDA", "adamw-fused": "",
    "adamw-triton": "flopcast's own, which clips while it steps", "adamw8bit": "bitsandbytes", "sgd": "",
    "sgd-momentum": "", "adafactor": "", "adafactor-foreach": "", "muon": "with AdamW for what is no inner matrix",
}  # fmt: skip
CLIPPING = ("adamw-triton",)  # optimizers that clip by themselves
CHECKPOINTS = {
    "none": "", "full": "layers are computed again",
    "selective": "layers but for their attention and every other matrix product",
}  # fmt: skip
MODES = {"eager": "", "compile": "torch.compile", "compile-graphs": "its reduce-overhead"}
TORCH_MODES = {"compile": None, "compile-graphs": "reduce-overhead"}  # the `mode` of torch.compile
MATMULS = ("torch", "triton", "best")
ATTENTIONS = ("sdpa", "sdpa-flash", "sdpa-cudnn", "triton", "best")
FUSED = ("none", "triton", "patch")
PHASES = ("train", "prefill", "decode")
CACHES = ("auto", "dynamic", "static")
NEW_TOKENS = 128  # for which a static cache has places behind the context, as `generate` makes it for its new tokens
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configs name the number of experts
ADAPTERS = ("lora", "qlora")  # ways to fine-tune that train adapters alone
FINETUNES = ("full", *ADAPTERS)  # and last=N
QUANTISED = ("fp8", "int8", "int4")  # weights of inference alone
BASE_DTYPES = ("auto", "fp32", "bf16", *QUANTISED)
ONE_GPU = "none"  # in place of a layout over several

# Other values that users know of precisions and of torch.compile's `mode` and `backend`, and why they are not modelled.
_ANY_BACKEND = "; of torch.compile only its own backend, inductor, is modelled, since what it generates can be read"
_TUNED = "; max-autotune chooses kernels by timing them while it compiles, which takes the GPU itself"
_OTHER_MODES = {
    "max-autotune": _TUNED, "max-autotune-no-cudagraphs": _TUNED,
    "default": "; torch's mode 'default' is --mode compile", "reduce-overhead": "; torch's 'reduce-overhead' is "
    "--mode compile-graphs",
}  # fmt: skip
_OTHER_PRECISIONS = {
    "fp8": "; torch has products in fp8 (torch._scaled_mm) but no layer that trains in it: the scales and casts are "
    "torchao's or Transformer Engine's, whose kernels no profile holds. Its roof: `flopcast roofline`",
    "fp16": "; torch trains fp16 under autocast with a gradient scaler: autocast-fp16",
    "bf16-autocast": "; it is autocast-bf16", "fp16-autocast": "; it is autocast-fp16",
}  # fmt: skip


def why_not(mode: str) -> str:
    """Why a mode or a backend of torch.compile is not modelled, as the end of a sentence."""
    return _OTHER_MODES.get(mode, _ANY_BACKEND)


def usual_dtype(precision: str) -> str:
    """The dtype of the weights of a precision, where nothing else is said: "bf16" or "fp32"."""
    return "bf16" if precision == "bf16" else "fp32"


@dataclass(frozen=True)
class Setting:
    """What is said of a setting beside its type and default: `meaning`, the help text of its option, with the choices
    in place of "{}"; `valid`, its choices, its range, or a check; `why_not`, the end of the sentence that refuses a
    value; `offered`, what a shell offers at TAB where that is not the choices."""

    meaning: str
    valid: Choices | range | Valid | None = None
    why_not: Callable[[Any], str] = lambda value: ""
    offered: Sequence[str] = ()

    @property
    def help(self) -> str:
        if not isinstance(self.valid, Mapping):
            return self.meaning
        *words, last = (f"{value} ({about})" if about else value for value, about in self.valid.items())
        return self.meaning.format(f"{', '.join(words)} or {last}")

    @property
    def completions(self) -> Sequence[str]:
        return self.offered or (() if isinstance(self.valid, (range, Valid)) else tuple(self.valid or ()))

    def check(self, name: str, value: Any) -> None:
        """Raises UsageError for a value that is not valid."""
        if words := self._valid_for(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            told = f"{name} {value!r}" if isinstance(value, str) else f"{name} is {shown}"
            raise UsageError(f"{told}: valid {words}{self.why_not(value)}")

    def _valid_for(self, value: Any) -> str:
        """What is valid in place of a wrong value, as a clause; "" for a right one."""
        if isinstance(self.valid, Valid):
            return "" if self.valid.is_valid(value) else self.valid.valid
        if self.valid is None or value in self.valid:
            return ""
        if isinstance(self.valid, range):
            return f"is an integer of at least {self.valid.start}, at most {self.valid[-1]}"
        return f"are {', '.join(self.valid)}"


_SETTING = "setting"  # in a field's metadata


def setting(
    meaning: str,
    valid: Choices | range | Valid | None = None,
    why_not: Callable[[Any], str] = lambda value: "",
    offered: Sequence[str] = (),
) -> Mapping[str, Setting]:
    """The metadata of a field that is a setting, as `Setting` has it."""
    return {_SETTING: Setting(meaning, valid, why_not, offered)}


def settings_of(kind: type[Recipe]) -> Mapping[str, Setting]:
    """The settings of a class, by name, also those to which it gives another default."""
    found = {one.name: one.metadata.get(_SETTING) for one in (*fields(kind), *fields(Recipe))}
    return {name: declared for name, declared in found.items() if declared is not None}


def _trains(finetune: str) -> bool:
    count = finetune.removeprefix("last=")
    is_last = finetune.startswith("last=") and count.isdecimal() and 1 <= int(count) <= MOST_LAYERS
    return finetune in FINETUNES or is_last


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a step is run.

    `batch` sequences of `seq` tokens are a micro-batch, of a data-parallel rank where there are several GPUs. With a
    `phase` other than "train" a step is one call of inference; `seq` is then not used. `matmul` and `attention` name
    the kernels that run the products and the attention, which "torch" and "sdpa" leave to torch.
    """

    batch: Size = field(default=4, metadata=setting("Sequences per micro-batch.", range(1, 2**20 + 1)))
    seq: Size = field(default=256, metadata=setting("Tokens per sequence.", range(1, MOST_SEQ + 1)))
    accumulate: Size = field(default=1, metadata=setting("Micro-batches per step.", range(1, 1024 + 1)))
    checkpoint: str = field(default="none", metadata=setting("Activation checkpointing: {}.", CHECKPOINTS))
    precision: str = field(
        default="autocast-bf16",
        metadata=setting("Precision: {}.", PRECISIONS, lambda value: _OTHER_PRECISIONS.get(value, "")),
    )
    optimizer: str = field(default="adamw", metadata=setting("Optimizer: {}.", OPTIMIZERS))
    mode: str = field(default="eager", metadata=setting("How torch runs the step: {}.", MODES, why_not))
    matmul: str = field(
        default="torch",
        metadata=setting(
            "Backend of matrix products: torch, triton, or best, for each the faster of both by the profile.", MATMULS
        ),
    )
    attention: str = field(
        default="sdpa",
        metadata=setting(
            "Backend of attention: sdpa (torch's pick), sdpa-flash, sdpa-cudnn, triton, or best, the fastest by the "
            "profile.",
            ATTENTIONS,
        ),
    )
    fused: str = field(
        default="none",
        metadata=setting(
            "Fused kernels: none, triton for Qwen3's norms, rotary embedding, SwiGLU and loss, or patch for what "
            "flopcast.kernels.patch.patch makes of an eager step.",
            FUSED,
        ),
    )
    clip: NonNegative = field(
        default=0.0,
        metadata=setting(
            "Norm to which the gradients are clipped before the optimizer steps; 0 for none.",
            Valid(lambda norm: 0 <= norm < inf, "is a norm above 0, or 0 for no clipping"),
        ),
    )
    finetune: str = field(
        default="full",
        metadata=setting(
            "What is trained: full (all), last=N (the last N layers), lora (adapters, by peft) or qlora (adapters on "
            "weights of 4 bits, as bitsandbytes keeps them).",
            Valid(_trains, "are full, lora, qlora and last=N, N layers from 1 on"),
            offered=(*FINETUNES, "last="),
        ),
    )
    lora_rank: Size = field(default=16, metadata=setting("Rank of LoRA's and QLoRA's adapters.", range(1, 65536 + 1)))
    lora_targets: str = field(
        default="all-linear",
        metadata=setting(
            "What has adapters: all-linear, or names of linear layers, as q_proj,v_proj.",
            Valid(
                lambda names: all(part.strip() for part in names.split(",")),
                "are all-linear, or names of linear layers with commas between, such as q_proj,v_proj",
            ),
        ),
    )
    base_dtype: str = field(
        default="auto",
        metadata=setting(
            "Dtype of the weights: bf16 or fp32; with --phase also fp8, int8 or int4, but for the output layer. auto: "
            "bf16 under LoRA's adapters, else as --precision says.",
            BASE_DTYPES,
        ),
    )
    phase: str = field(
        default="train",
        metadata=setting(
            "What a step is: train, or one call of inference with --context: prefill or decode, in bf16 where no "
            "--precision is given. No serving: no queue, no batching of requests.",
            PHASES,
        ),
    )
    context: Count = field(
        default=0, metadata=setting("Tokens per sequence of a call of inference: the prompt, or what the cache holds.")
    )
    cache: str = field(
        default="auto",
        metadata=setting(
            "Cache of keys and values of a call of inference: dynamic (grows), static (has its places), or auto: "
            "dynamic, and static where calls are compiled.",
            CACHES,
        ),
    )
    parallel: str = field(
        default=ONE_GPU,
        metadata=setting(
            "Several GPUs: ddp=N, zero1=N, zero2=N, fsdp=N, hsdp=RxS (replicas of shards), tp=N, pp=N, ep=N, cp=N or "
            "products of these, as tp=2,fsdp=4; own=N: as a module or step function lays itself out. --batch is that "
            "of a data-parallel GPU. none: one GPU.",
            offered=("ddp=", "zero1=", "zero2=", "fsdp=", "hsdp=", "tp=", "pp=", "ep=", "cp=", "own="),
        ),
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a Recipe, by name, of one that has more: what another one is made of."""
        return {one.name: getattr(self, one.name) for one in fields(Recipe)}

    @property
    def unusual(self) -> dict[str, Any]:
        """The settings that are not at their defaults, by name, in the order of the fields."""
        found = {name: getattr(self, name) for name in settings_of(type(self))}
        return {name: value for name, value in found.items() if value != getattr(type(self), name)}

    @property
    def layout(self) -> Layout:
        """Raises UsageError where `parallel` is none."""
        from flopcast.microbench.recipe.layout import Layout  # which `flopcast --help` does without

        return Layout.parse(self.parallel) if self.is_parallel else Layout()

    @property
    def is_parallel(self) -> bool:
        return self.parallel != ONE_GPU

    @property
    def clip_before(self) -> float:
        """The norm to which a step clips before its optimizers step; 0 where they clip by themselves."""
        return 0.0 if self.optimizer in CLIPPING else self.clip

    @property
    def cache_kind(self) -> str:
        """What `cache` stands for: "auto" is transformers' own choice, a cache that grows, and a static one where calls
        are compiled, which a growing one would have compiled anew for every token."""
        if self.cache != "auto":
            return self.cache
        return "dynamic" if self.mode == "eager" else "static"

    @property
    def weights_dtype(self) -> str:
        """What `base_dtype` stands for: "auto" is bf16 under adapters, which train beside weights that need no more,
        and else as the precision has them, "bf16" or "fp32"."""
        if self.base_dtype != "auto":
            return self.base_dtype
        is_beside_adapters = self.finetune in ADAPTERS and self.precision == "autocast-bf16"
        return "bf16" if is_beside_adapters else usual_dtype(self.precision)

    def check_each(self) -> None:
        """Raises UsageError for the first setting that is not valid by itself."""
        for name, one in settings_of(type(self)).items():
            one.check(name, getattr(self, name))
