"""The options that several commands share, each declared once with its words of help: single ones, and groups of them
(`groups`), which hand a command what they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopcast.errors import UsageError
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.stream.model.models import Config

Gpu = Annotated[str, typer.Option("--gpu", help="A known GPU (`flopcast gpus`) or a profile file.")]
Gpus = Annotated[str, typer.Option(help="Comma-separated GPUs.")]
Host = Annotated[str | None, typer.Option(help="Host for the GPU: one of `flopcast gpus`, a profile's, `none`.")]
PriceKind = Annotated[str, typer.Option("--kind", help="on-demand or spot.")]
PriceBook = Annotated[
    Path | None,
    typer.Option(
        "--prices", help="Price book, CSV or TOML, or a CSV of SkyPilot's catalogue; default: the shipped one."
    ),
]
PriceDay = Annotated[str | None, typer.Option("--on", help="Newest prices up to this day, YYYY-MM-DD.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu; default: cuda where there is one.")]
Suite = Annotated[
    str | None,
    typer.Option(help="quick (a minute; the default), standard, or fused: patched with the fused kernels alone."),
]
Out = Annotated[Path, typer.Option(help="Folder to write to; what it holds already is not done again.")]
Retry = Annotated[bool, typer.Option("--retry", help="Measure again what failed or ran out of memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]

ALL_GPUS = "nvidia-l4,nvidia-a100-80gb-pcie,nvidia-h100-sxm,nvidia-h200"  # that `cost` and `plan` compare by default


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model: a config, a module, or a width and what of its shape departs from the ladder's."""

    config: Annotated[
        str | None, typer.Option(help="A transformers config.json, or a shipped name such as qwen3-0.6b.")
    ] = None
    module: Annotated[
        str | None,
        typer.Option(
            help="package.module:factory, which returns (module, batch[, loss_fn]) or a step function and is given "
            "--batch and --seq if it has parameters of these names; e.g. flopcast.microbench.zoo:vit_b16."
        ),
    ] = None
    width: Annotated[int | None, typer.Option(help="Hidden size; the rest follows the ladder's shape.")] = None
    depth: Annotated[int | None, typer.Option(help="Layers; overrides the config's and the depth law's.")] = None
    depth_law: Annotated[
        str | None, typer.Option(help="Layers where no config is given: printed (the default), ln or qwen3.")
    ] = None
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; must divide the heads.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None
    ffn: Annotated[int | None, typer.Option(help="Intermediate size.")] = None
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None
    tied: Annotated[bool | None, typer.Option("--tied/--untied", help="Whether embedding and head share weights.")] = (
        None
    )

    def to_config(self) -> Config:
        """The config that is asked for. Raises UsageError."""
        from flopcast.roofline.stream.model.models import model_from

        return model_from(**{name: value for name, value in vars(self).items() if name != "module"})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a step is run: `Run`, field by field."""

    batch: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = Run.batch
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = Run.seq
    accumulate: Annotated[int, typer.Option(help="Micro-batches a step.")] = Run.accumulate
    checkpoint: Annotated[str, typer.Option(help="Activation checkpointing: none or full.")] = Run.checkpoint
    precision: Annotated[str, typer.Option(help="autocast-bf16, bf16, tf32 or fp32.")] = Run.precision
    optimizer: Annotated[str, typer.Option(help="adamw (torch's default: foreach on CUDA) or adamw-fused.")] = (
        Run.optimizer
    )
    mode: Annotated[str, typer.Option(help="eager; compile is not modelled yet.")] = Run.mode
    matmul: Annotated[str, typer.Option(help="torch or triton; best is not modelled yet.")] = Run.matmul
    attention: Annotated[
        str, typer.Option(help="sdpa (what torch picks), sdpa-flash, sdpa-cudnn or triton; best is not modelled yet.")
    ] = Run.attention
    fused: Annotated[
        str, typer.Option(help="triton: Qwen3's norms, rope, SwiGLU and loss by the fused kernels; or none.")
    ] = Run.fused

    def to_run(self) -> Run:
        """The run that is asked for. Raises UsageError for what is invalid or not modelled yet."""
        run = Run(**vars(self))
        run.check()
        return run


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """Which price of a GPU counts: `prices.price_book` finds it."""

    prices: PriceBook = None
    price: Annotated[list[str] | None, typer.Option(help="GPU=USD per hour, e.g. nvidia-h200=3.99; repeatable.")] = None
    provider: Annotated[
        list[str] | None,
        typer.Option(help="Provider of the price, for all GPUs or as GPU=PROVIDER; default: RunPod Secure Cloud."),
    ] = None
    on: PriceDay = None


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """Which hosts feed several GPUs."""

    host: Annotated[
        str | None, typer.Option(help="One host for all GPUs: one of `flopcast gpus --hosts`, a profile's, `none`.")
    ] = None
    hosts: Annotated[
        str,
        typer.Option(
            help="own: each GPU in a machine of its own; same: in one machine, whose pace cancels in comparisons."
        ),
    ] = "own"


def refuse_unused(why: str, given: Mapping[str, object]) -> None:
    """Raises UsageError for the first option, by its name, that was given and has no effect beside the others: `why`
    continues "--name value" in words."""
    for name, value in given.items():
        if value not in (None, False) and value != []:
            said = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            raise UsageError(f"{said} {why}; leave it out")


def module_sizes(context: typer.Context, model: ModelOptions, run: RunOptions) -> dict[str, int]:
    """The batch and length that a factory is asked for: those of the command line. Raises UsageError where an option
    describes another model."""
    if model.module is None:
        return {}
    clash = next((name for name, value in sorted(vars(model).items()) if name != "module" and value is not None), None)
    if clash is not None:
        raise UsageError(f"--module with --{clash.replace('_', '-')}: the factory makes the model, give one of the two")
    if run.fused != "none":
        raise UsageError(
            f"--module with --fused {run.fused}: a factory patches its own model, leave one of the two out"
        )
    sizes = {"batch": run.batch, "seq": run.seq}
    return {name: value for name, value in sizes.items() if is_given(context, name)}


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def whole_numbers(option: str, text: str) -> list[int]:
    """Comma-separated integers, one at least. Raises UsageError."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"{option} is {text!r}: valid are integers with commas between")
    return found


def ladder_of(widths: str | None, depth_law: str) -> list[Config]:
    """The ladder's models at comma-separated widths, each once and in order, or at all of its own. Raises
    UsageError."""
    from flopcast.roofline.stream.model.models import LADDER_WIDTHS, ladder

    chosen = LADDER_WIDTHS if widths is None else tuple(sorted(set(whole_numbers("--widths", widths))))
    return ladder(chosen, depth_law)
