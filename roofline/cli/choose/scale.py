"""`flopcast scale`: how a step scales over GPUs, where more stop paying, and from which batch or width they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.completion import one_of
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import AsJson, Gpu, Host, ModelOptions, PriceOptions, given, whole_numbers
from flopcast.roofline.cli.step.layouts import workload
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.dollars.layouts import Workload
    from flopcast.roofline.dollars.scaling import Scaling, Turning

EACH = 4  # sequences per GPU of the most, where no --batch is given


@dataclass(frozen=True)
class Answer:
    """How a step scales both ways, by kind, and from which batch and width its next doubling pays. `sizes`: those of
    the module's factory that --vary gave it."""

    sizes: Mapping[str, int]
    work: Workload
    scalings: Sequence[Scaling]
    turnings: Sequence[Turning]

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes), "sequences": self.work.sequences,
            **{one.kind: one.to_json() for one in self.scalings},
            "next_doubling": [one.to_json() for one in self.turnings],
        }  # fmt: skip


def scale(
    typed: Context,
    gpu: Gpu,
    num_gpus: Annotated[int, Option(help="The most GPUs: 1, 2, 4, ... up to it are forecast.")] = 8,
    *,
    model: ModelOptions,
    batch: Annotated[
        int | None,
        Option(
            help="Sequences per step on one GPU. Strong scaling divides them among the GPUs, weak scaling gives each "
            "as many. Default: 4 per GPU of the most."
        ),
    ] = None,
    run: Annotated[Run, Only("seq", "checkpoint", "precision", "optimizer", "nodes", "link")],
    parallel: Annotated[
        str,
        Option(
            help="Layouts on several GPUs: auto (the faster of ddp and fsdp, over several hosts also hsdp), all, or "
            "one whose part without a number takes the GPUs that are left, such as fsdp or tp=2,fsdp.",
            autocompletion=one_of(("auto", "all", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tp=2,fsdp")),
        ),
    ] = "auto",
    worth: Annotated[
        float, Option(help="A doubling pays where the GPUs added do at least this share of what as many did before.")
    ] = 0.5,
    vary: Annotated[
        str | None,
        Option(help="With --module: a parameter of the factory and its values, each scaled, such as size=224,448."),
    ] = None,
    host: Host = None,
    price: PriceOptions,
    out: Annotated[Path | None, Option(help="Folder to write scale.csv and scale.png to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Forecasts a step on 1, 2, 4, ... GPUs: time, efficiency, tokens per dollar, and where more GPUs stop paying."""
    from flopcast.roofline.base.csv_files import check_writable
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.dollars.layouts import check_gpus
    from flopcast.roofline.dollars.scaling import check_pattern
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.several_gpus import print_scaling

    check_gpus(num_gpus, run.nodes)
    check_pattern(parallel)
    check_writable(out, is_folder=True)
    if batch is not None and batch < 1:
        raise UsageError(f"--batch is {batch}: valid is an integer of at least 1")
    each = replace(run, batch=EACH * num_gpus if batch is None else batch)
    work = workload(typed, gpu, model, each, host, price)
    work = replace(work, sequences=each.batch)
    answers = []
    with progress("scaling") as shown:
        for sizes, one in _varied(work, vary):
            answers.append(_answer(typed, sizes, one, num_gpus, model, parallel, worth, shown.update))
    if out is not None:
        for path in _write(answers, out):
            say(f"wrote {path}")
    if as_json:
        emit({
            "gpu": work.profile.gpu, "profile_basis": work.profile.basis, "parallel": parallel, "worth": worth,
            "answers": [answer.to_json() for answer in answers],
        })  # fmt: skip
    else:
        for answer in answers:
            print_scaling(answer.work, answer.scalings, answer.turnings, answer.sizes)


def _varied(work: Workload, vary: str | None) -> Iterator[tuple[dict[str, int], Workload]]:
    """Yields the workload for each value of --vary. Raises UsageError."""
    from flopcast.roofline.stream.library.modules import Module

    if vary is None:
        yield {}, work
        return
    name, is_given, values = vary.partition("=")
    if not isinstance(work.model, Module) or not is_given or name in ("batch", ""):
        raise UsageError(
            f"--vary {vary}: valid is, with --module, a parameter of its factory other than batch and its values, such "
            "as size=224,448"
        )
    for value in whole_numbers("--vary", values):
        yield {name: value}, replace(work, model=work.model.resized(**{name: value}))


def _answer(
    typed: Context,
    sizes: dict[str, int],
    work: Workload,
    most: int,
    model: ModelOptions,
    parallel: str,
    worth: float,
    shown: Callable[[int, int], None],
) -> Answer:
    from flopcast.roofline.dollars.scaling import STRONG, WEAK, next_batch, next_width, scaling

    found = [scaling(work, kind, most, parallel, worth, shown) for kind in (STRONG, WEAK)]
    strong = found[0]
    turnings = [next_batch(work, strong)]
    if model.width is not None and model.config is None and "depth" not in given(typed, model):
        turnings.append(
            next_width(work, strong, model.width, lambda width: replace(model, width=width).to_config(), parallel)
        )
    return Answer(sizes, work, found, [one for one in turnings if one is not None])


def _write(answers: Sequence[Answer], folder: Path) -> list[Path]:
    """Writes the points of all answers, a row each, and their figure."""
    from flopcast.roofline.base.csv_files import write_rows
    from flopcast.roofline.views.figures.file import save
    from flopcast.roofline.views.figures.several_gpus import scaling_figure

    rows = []
    for answer in answers:
        for one in answer.scalings:
            for point in one.points:
                record = point.to_json()
                memory = record.pop("memory", None) or {}
                rows.append({
                    **answer.sizes, "kind": one.kind, **record,
                    **{f"memory_{part}": size for part, size in memory.items()},
                })  # fmt: skip
    table = folder / "scale.csv"
    write_rows(table, list(dict.fromkeys(name for row in rows for name in row)), rows)
    paths = [table]
    figure = scaling_figure([(_label(answer), answer.scalings) for answer in answers])
    if figure is not None:
        paths.append(folder / f"{figure.name}.png")
        save(figure, paths[-1], "folder with --out")
    return paths


def _label(answer: Answer) -> str:
    return ", ".join(f"{name} {value}" for name, value in answer.sizes.items())
