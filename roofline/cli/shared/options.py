"""The options that several commands share, each with its words of help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from flopcast.errors import UsageError

Gpu = Annotated[str, typer.Option("--gpu", help="A known GPU (`flopcast gpus`) or a profile file.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
ConfigName = Annotated[
    str | None, typer.Option(help="A transformers config.json, or a shipped name such as qwen3-0.6b.")
]
Width = Annotated[int | None, typer.Option(help="Hidden size; the rest follows the ladder's shape.")]
Depth = Annotated[int | None, typer.Option(help="Layers; overrides the config's and the depth law's.")]
DepthLaw = Annotated[
    str | None, typer.Option(help="Layers where no config is given: printed (the default), ln or qwen3.")
]
Heads = Annotated[int | None, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="Key and value heads; must divide the heads.")]
HeadDim = Annotated[int | None, typer.Option(help="Size of a head.")]
Ffn = Annotated[int | None, typer.Option(help="Intermediate size.")]
Vocab = Annotated[int | None, typer.Option(help="Vocabulary size.")]
Tied = Annotated[bool | None, typer.Option("--tied/--untied", help="Whether embedding and head share weights.")]
ModuleName = Annotated[
    str | None,
    typer.Option(
        "--module",
        help="package.module:factory, which returns (module, batch[, loss_fn]) or a step function and is given --batch "
        "and --seq if it has parameters of these names; e.g. flopcast.microbench.zoo:vit_b16.",
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences a micro-batch.")]
Seq = Annotated[int, typer.Option(help="Tokens a sequence.")]
Accumulate = Annotated[int, typer.Option(help="Micro-batches a step.")]
Checkpoint = Annotated[str, typer.Option(help="Activation checkpointing: none or full.")]
Precision = Annotated[str, typer.Option(help="autocast-bf16, bf16, tf32 or fp32.")]
Optimizer = Annotated[str, typer.Option(help="adamw (torch's default: foreach on CUDA) or adamw-fused.")]
Mode = Annotated[str, typer.Option(help="eager; compile is not modelled yet.")]
Matmul = Annotated[str, typer.Option(help="torch or triton; best is not modelled yet.")]
Attention = Annotated[
    str, typer.Option(help="sdpa (what torch picks), sdpa-flash, sdpa-cudnn or triton; best is not modelled yet.")
]
Fused = Annotated[str, typer.Option(help="triton: Qwen3's norms, rope, SwiGLU and loss by the fused kernels; or none.")]
Host = Annotated[str | None, typer.Option(help="Host for the GPU: one of `flopcast gpus`, a profile's, `none`.")]

PriceFile = Annotated[
    Path | None,
    typer.Option(
        "--prices", help="Price book, CSV or TOML, or a CSV of SkyPilot's catalogue; default: the shipped one."
    ),
]
PriceGiven = Annotated[
    list[str] | None, typer.Option("--price", help="GPU=USD per hour, e.g. nvidia-h200=3.99; repeatable.")
]
Provider = Annotated[
    list[str] | None,
    typer.Option(help="Provider of the price, for all GPUs or as GPU=PROVIDER; default: RunPod Secure Cloud."),
]
PriceDate = Annotated[str | None, typer.Option("--on", help="Newest prices up to this day, YYYY-MM-DD.")]
PriceKind = Annotated[str, typer.Option("--kind", help="on-demand or spot.")]


def refuse_unused(why: str, given: Mapping[str, object]) -> None:
    """Raises UsageError for the first option, by its name, that was given and has no effect beside the others: `why`
    continues "--name value" in words."""
    for name, value in given.items():
        if value not in (None, False) and value != []:
            said = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            raise UsageError(f"{said} {why}; leave it out")


def module_sizes(context: typer.Context, module: str | None, fused: str) -> dict[str, int]:
    """The batch and length that a factory is asked for: those of the command line. Raises UsageError where an option
    describes another model."""
    if module is None:
        return {}
    shapes = ("config", "width", "depth", "depth_law", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied")
    clash = next((name for name in sorted(shapes) if _is_given(context, name)), None)
    if clash is not None:
        raise UsageError(f"--module with --{clash.replace('_', '-')}: the factory makes the model, give one of the two")
    if fused != "none":
        raise UsageError(f"--module with --fused {fused}: a factory patches its own model, leave one of the two out")
    return {name: context.params[name] for name in ("batch", "seq") if _is_given(context, name)}


def _is_given(context: typer.Context, name: str) -> bool:
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


HOST_SUITE = "host"
BACKENDS = ("torch", "triton", "sdpa-flash", "sdpa-cudnn")  # of a suite's cases

Device = Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu; default: cuda where there is one.")]
Suite = Annotated[
    str | None,
    typer.Option(help="quick (a minute; the default), standard, or fused: patched with the fused kernels alone."),
]
Out = Annotated[Path, typer.Option(help="Folder to write to; what it holds already is not done again.")]
Retry = Annotated[bool, typer.Option("--retry", help="Measure again what failed or ran out of memory.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
