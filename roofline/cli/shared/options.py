"""The options that several commands share, each declared once with its help text: single ones, and groups of them
(`groups`), which convert to the object that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared import completion
from flopcast.roofline.cli.shared.completion import one_of, several_of
from flopcast.roofline.stream.model.run import (
    ATTENTIONS,
    BASE_DTYPES,
    CACHES,
    FUSED,
    MATMULS,
    MODES,
    OPTIMIZERS,
    PHASES,
    PRECISIONS,
    Run,
)

if TYPE_CHECKING:
    from flopcast.roofline.stream.model.models import Config

_GPU_HELP = "A known GPU (`flopcast gpus`), in short if only one is meant, as H200, or a profile file."
_GPUS_HELP = "GPUs, separated by commas; all for every known one."
Gpu = Annotated[str, Option("--gpu", help=_GPU_HELP, autocompletion=one_of(completion.gpus))]
OneGpu = Annotated[str | None, Option("--gpu", help=_GPU_HELP, autocompletion=one_of(completion.gpus))]
Gpus = Annotated[str, Option("--gpus", help=_GPUS_HELP, autocompletion=several_of(completion.gpus))]
SeveralGpus = Annotated[
    str | None, Option("--gpus", help=f"In place of --gpu: {_GPUS_HELP}", autocompletion=several_of(completion.gpus))
]
Host = Annotated[
    str | None,
    Option(
        help="Host that feeds the GPU: one of `flopcast gpus --hosts`, a profile's, or none.",
        autocompletion=one_of(completion.hosts),
    ),
]
PriceKind = Annotated[
    str, Option("--kind", help="Kind of price: on-demand or spot.", autocompletion=one_of(("on-demand", "spot")))
]
PriceBook = Annotated[
    Path | None,
    Option("--prices", help="Price book: CSV, TOML, or a CSV of SkyPilot's catalogue. Default: the shipped one."),
]
PriceDay = Annotated[str | None, Option("--on", help="Take the newest prices up to this day, YYYY-MM-DD.")]
Device = Annotated[str | None, Option(help="Device: cuda, cuda:N or cpu. Default: cuda where there is a GPU.")]
Suite = Annotated[
    str | None,
    Option(
        help="Suite: quick (a minute; the default), standard, fused (steps patched with the fused kernels), "
        "fine-tune (adapters, frozen layers, clipping, optimizers other than AdamW), inference, images, precisions or "
        "bitsandbytes (QLoRA, AdamW in 8 bits).",
        autocompletion=one_of(
            ("quick", "standard", "fused", "fine-tune", "inference", "images", "precisions", "bitsandbytes")
        ),
    ),
]
Out = Annotated[Path, Option(help="Folder to write to. What it already holds is not done again.")]
Retry = Annotated[bool, Option("--retry", help="Measure again what failed or ran out of memory.")]
Theme = Annotated[
    str | None,
    Option(help="Background of the figure: light (default) or dark.", autocompletion=one_of(("light", "dark"))),
]
NumGpus = Annotated[
    int | None,
    Option(help="GPUs over which --parallel auto looks for layouts, each with --batch times --accumulate sequences."),
]
Budget = Annotated[float | None, Option(help="Seconds to measure for. The next run continues.")]
AsJson = Annotated[bool, Option("--json", help="Write one JSON document to stdout, everything else to stderr.")]

ALL_GPUS = "nvidia-l4,nvidia-a100-80gb-pcie,nvidia-h100-sxm,nvidia-h200"  # compared by `cost` and `plan` by default


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model: a config, a module, or a width with the sizes that depart from the ladder's shape."""

    config: Annotated[
        str | None,
        Option(
            help="Model: a transformers config.json, or a shipped name such as qwen3-0.6b.",
            autocompletion=one_of(completion.configs),
        ),
    ] = None
    module: Annotated[
        str | None,
        Option(
            help="Model: package.module:factory or path/file.py:factory, a function that returns (module, batch[, "
            "loss_fn]) or a step function and is given --batch and --seq if it has parameters of these names. "
            "Example: flopcast.microbench.zoo:vit_b16."
        ),
    ] = None
    width: Annotated[int | None, Option(help="Hidden size. The other sizes follow the ladder's shape.")] = None
    depth: Annotated[int | None, Option(help="Number of layers. Overrides the config's and the depth law's.")] = None
    depth_law: Annotated[
        str | None,
        Option(
            help="Law of the number of layers, without a config: printed (the default), ln or qwen3.",
            autocompletion=one_of(("printed", "ln", "qwen3")),
        ),
    ] = None
    heads: Annotated[int | None, Option(help="Number of query heads.")] = None
    kv_heads: Annotated[int | None, Option(help="Number of key and value heads. Must divide the query heads.")] = None
    head_dim: Annotated[int | None, Option(help="Size of one head.")] = None
    ffn: Annotated[int | None, Option(help="Intermediate size of the feed-forward layers.")] = None
    vocab: Annotated[int | None, Option(help="Vocabulary size.")] = None
    tied: Annotated[
        bool | None, Option("--tied/--untied", help="Whether the embedding and the output layer share weights.")
    ] = None

    def to_config(self) -> Config:
        """Returns the config that the options describe. Raises UsageError."""
        from flopcast.roofline.stream.model.models import model_from

        return model_from(**{name: value for name, value in vars(self).items() if name != "module"})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a step is run: one option per field of `Run`."""

    batch: Annotated[int, Option(help="Sequences per micro-batch.")] = Run.batch
    seq: Annotated[int, Option(help="Tokens per sequence.")] = Run.seq
    accumulate: Annotated[int, Option(help="Micro-batches per step.")] = Run.accumulate
    checkpoint: Annotated[
        str, Option(help="Activation checkpointing: none or full.", autocompletion=one_of(("none", "full")))
    ] = Run.checkpoint
    precision: Annotated[
        str,
        Option(
            help="Precision: autocast-bf16, autocast-fp16 (with a GradScaler), bf16, tf32 or fp32.",
            autocompletion=one_of(PRECISIONS),
        ),
    ] = Run.precision
    optimizer: Annotated[
        str,
        Option(
            help="Optimizer: adamw (torch's default, foreach on CUDA), adamw-fused, adamw8bit (bitsandbytes), sgd, "
            "sgd-momentum, adafactor, adafactor-foreach or muon (with AdamW for what is no inner matrix).",
            autocompletion=one_of(OPTIMIZERS),
        ),
    ] = Run.optimizer
    clip: Annotated[
        float, Option(help="Norm to which the gradients are clipped before the optimizer steps; 0 for none.")
    ] = Run.clip
    finetune: Annotated[
        str,
        Option(
            help="What is trained: full (all), last=N (the last N layers), lora (adapters, by peft) or qlora (adapters "
            "on weights of 4 bits, as bitsandbytes keeps them).",
            autocompletion=one_of(("full", "lora", "qlora", "last=")),
        ),
    ] = Run.finetune
    lora_rank: Annotated[int, Option(help="Rank of LoRA's and QLoRA's adapters.")] = Run.lora_rank
    lora_targets: Annotated[
        str, Option(help="What has adapters: all-linear, or names of linear layers, as q_proj,v_proj.")
    ] = Run.lora_targets
    base_dtype: Annotated[
        str,
        Option(
            help="Dtype of the weights: bf16 or fp32; with --phase also fp8, int8 or int4, but for the output layer. "
            "auto: bf16 under LoRA's adapters, else as --precision says.",
            autocompletion=one_of(BASE_DTYPES),
        ),
    ] = Run.base_dtype
    phase: Annotated[
        str,
        Option(
            help="What a step is: train, or one call of inference with --context: prefill or decode, in bf16 where no "
            "--precision is given. No serving: no queue, no batching of requests.",
            autocompletion=one_of(PHASES),
        ),
    ] = Run.phase
    context: Annotated[
        int, Option(help="Tokens per sequence of a call of inference: the prompt, or what the cache holds.")
    ] = Run.context
    cache: Annotated[
        str,
        Option(
            help="Cache of keys and values of a call of inference: dynamic (grows), static (has its places), or auto: "
            "dynamic, and static where calls are compiled.",
            autocompletion=one_of(CACHES),
        ),
    ] = Run.cache
    imbalance: Annotated[
        float,
        Option(
            help="Of a model with experts: tokens of the fullest expert over the mean, with --parallel ep=N of the "
            "fullest GPU; 1: balanced."
        ),
    ] = Run.imbalance
    mode: Annotated[
        str,
        Option(
            help="How torch runs the step: eager, compile (torch.compile) or compile-graphs (its reduce-overhead).",
            autocompletion=one_of(MODES),
        ),
    ] = Run.mode
    matmul: Annotated[
        str,
        Option(
            help="Backend of matrix products: torch, triton, or best, for each the faster of both by the profile.",
            autocompletion=one_of(MATMULS),
        ),
    ] = Run.matmul
    attention: Annotated[
        str,
        Option(
            help="Backend of attention: sdpa (torch's pick), sdpa-flash, sdpa-cudnn, triton, or best, the fastest"
            " by the profile.",
            autocompletion=one_of(ATTENTIONS),
        ),
    ] = Run.attention
    fused: Annotated[
        str,
        Option(
            help="Fused kernels: none, triton for Qwen3's norms, rotary embedding, SwiGLU and loss, or patch for what"
            " flopcast.kernels.patch.patch makes of an eager step.",
            autocompletion=one_of(FUSED),
        ),
    ] = Run.fused

    parallel: Annotated[
        str,
        Option(
            help="Several GPUs: ddp=N, zero1=N, zero2=N, fsdp=N, hsdp=RxS (replicas of shards) or tp=N; --batch is "
            "that of a data-parallel GPU. none: one GPU.",
            autocompletion=one_of(("ddp=", "zero1=", "zero2=", "fsdp=", "hsdp=", "tp=")),
        ),
    ] = Run.parallel
    nodes: Annotated[
        int, Option(help="Hosts over which the GPUs of --parallel lie evenly; 0: as few as hold 8 each.")
    ] = Run.nodes
    link: Annotated[
        str,
        Option(
            help="Link between the GPUs of a host: one of `flopcast gpus --links`, or a file of `flopcast fit`. auto: "
            "the GPU's usual one.",
            autocompletion=one_of(completion.links),
        ),
    ] = Run.link

    def to_run(self) -> Run:
        """Returns the run that the options describe. Raises UsageError for what is invalid or not modelled yet."""
        run = Run(**vars(self))
        run.check()
        return run


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """Which price of a GPU is used; `price_book.price_book` finds it."""

    prices: PriceBook = None
    price: Annotated[
        list[str] | None, Option(help="Price as GPU=USD per hour, such as nvidia-h200=3.99. May be repeated.")
    ] = None
    provider: Annotated[
        list[str] | None,
        Option(help="Provider of the price, for all GPUs or as GPU=PROVIDER. Default: RunPod Secure Cloud."),
    ] = None
    on: PriceDay = None


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """Which hosts feed several GPUs."""

    host: Annotated[
        str | None,
        Option(
            help="One host for all GPUs: one of `flopcast gpus --hosts`, a profile's, or none.",
            autocompletion=one_of(completion.hosts),
        ),
    ] = None
    hosts: Annotated[
        str,
        Option(
            help="own: each GPU in a machine of its own. same: all in one, whose pace cancels in comparisons.",
            autocompletion=one_of(("own", "same")),
        ),
    ] = "own"


def refuse_unused(why: str, options: Mapping[str, object]) -> None:
    """Raises UsageError for the first of `options` (by name) that was given, as none has an effect here. `why` is the
    reason, printed after "--name value"."""
    for name, value in options.items():
        if value not in (None, False) and value != []:
            option = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            raise UsageError(f"{option} {why}; leave it out")


def given(context: Context, *groups: ModelOptions | RunOptions) -> dict[str, Any]:
    """Returns the options of groups that were given explicitly, by name."""
    return {
        name: value
        for group in groups
        for name, value in vars(group).items()
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }


def whole_numbers(option: str, text: str) -> list[int]:
    """Parses comma-separated integers, at least one. Raises UsageError."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"{option} is {text!r}: valid are integers with commas between")
    return found


def ladder_of(widths: str | None, depth_law: str) -> list[Config]:
    """Returns the ladder's models at comma-separated widths, each once and in ascending order; for None at all widths
    of the ladder. Raises UsageError."""
    from flopcast.roofline.stream.model.models import LADDER_WIDTHS, ladder

    chosen = LADDER_WIDTHS if widths is None else tuple(sorted(set(whole_numbers("--widths", widths))))
    return ladder(chosen, depth_law)
