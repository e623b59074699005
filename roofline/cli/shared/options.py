"""The options that several commands share, each declared once with its help text: single ones, and groups of them
(`groups`). How a step is run is `Run` itself, whose settings are options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared import completion
from flopcast.roofline.cli.shared.completion import one_of, several_of
from flopcast.roofline.stream.model.run import Run

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
        "patch (whole layers patched by `flopcast.patch`), adamw-triton (flopcast's AdamW), "
        "fine-tune (adapters, frozen layers, clipping, optimizers other than AdamW), inference, quantised (calls "
        "on weights of 8 and 4 bits), images, architectures (19 families of transformers), precisions, bitsandbytes "
        "(QLoRA, AdamW in 8 bits), checkpoints (selective ones) or random (24 steps that --seed draws).",
        autocompletion=one_of(completion.step_suites),
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


def given(context: Context, *groups: ModelOptions | Run) -> dict[str, Any]:
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
