"""`flopcast report`: makes the page of a GPU, and the index of several pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.cli.shared.options import AsJson, Device, Out, Suite, refuse_unused

if TYPE_CHECKING:
    from flopcast.roofline.dollars.standard import StandardGpu


def report(
    gpu: Annotated[str | None, Option("--gpu", help="A known GPU (`flopcast gpus`) or a profile file.")] = None,
    out: Out = Path("reports/local"),
    measure: Annotated[bool, Option("--measure", help="Measure this machine and run real steps first.")] = False,
    measurements: Annotated[Path | None, Option(help="Folder that `flopcast bench` wrote.")] = None,
    steps: Annotated[Path | None, Option(help="Folder of real steps that `flopcast validate` wrote.")] = None,
    index: Annotated[
        Path | None,
        Option(help="Folder of pages' folders, to make an index.html over. One beside OUT is kept up to date."),
    ] = None,
    device: Device = None,
    suite: Suite = None,
    as_json: AsJson = False,
) -> None:
    """Makes the page a person reads: roofline, a step's anatomy, forecast against measured, dollars, memory, host."""
    from flopcast import files
    from flopcast.roofline.cli.gpu import bench
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.gpu.catalogue.device import gpu_name
    from flopcast.roofline.gpu.fit import folder
    from flopcast.roofline.gpu.fit.cards import read_folder
    from flopcast.roofline.gpu.library.profiles import completed, find_profile
    from flopcast.roofline.step.fit_folder import fit_folder
    from flopcast.roofline.validation import run
    from flopcast.roofline.validation.comparable import check_device
    from flopcast.roofline.validation.compare_steps import compare_runs
    from flopcast.roofline.views.page import assemble
    from flopcast.roofline.views.page import index as page_index
    from flopcast.roofline.views.terminal.console import say, warn

    if not measure and measurements is None and gpu is None:
        raise UsageError("nothing to report on: give --measure, or --gpu NAME, or --measurements FOLDER")
    if measure:
        why = "with --measure, which reports on this machine and runs the steps itself"
        refuse_unused(why, {"gpu": gpu, "measurements": measurements, "steps": steps})
    else:
        refuse_unused("without --measure: it says what is measured", {"device": device, "suite": suite})
    ran_on = None if steps is None else run.machine_of(steps)
    known = None if gpu is None else find_profile(gpu)
    with progress("reading"):
        found = None if measurements is None else read_folder(measurements)
    of = None if found is None else found.machine["device"]
    if of is not None and gpu not in (None, gpu_name(of)):
        raise UsageError(
            f"--gpu {gpu} with --measurements {measurements}, which are of {gpu_name(of)}: the page is of the profile "
            "that they make; leave one of the two out"
        )
    if of is not None and ran_on is not None and ran_on["name"] != of["name"]:
        raise UsageError(
            f"the steps in {steps} ran on {ran_on['name']}, the measurements in {measurements} are of {of['name']}: "
            "give those of one device"
        )
    if ran_on is not None and known is not None:
        check_device(ran_on, known)
    if index is not None and not index.is_dir():
        raise UsageError(f"--index {str(index)!r} is no folder: give the one that holds the pages' folders")
    files.make_folder(out)  # fails before minutes of measuring and drawing, not after
    if measure:
        measurements, steps = out / "measurements", out / "steps"
        say(f"1/4 measuring this machine -> {measurements}")
        suite = suite or "quick"
        with resumable(measurements):
            summaries = bench.run_bench(device, suite, measurements)
        for part, text in summaries.items():
            say(f"    {part}: {text}")
        say("2/4 fitting a profile")
        found = read_folder(measurements)
        with progress("fitting"):
            profile, quality = fit_folder(measurements, found)
        warn(quality.warnings)  # a busy machine's before minutes of steps
        folder.save_profile(profile, out / "profile.json.gz")
        say(f"3/4 running real Qwen3 training steps -> {steps}")
        with resumable(out):
            done = run.run_validation_steps(device, suite, steps)
        say(f"    {done}")
        say("4/4 comparing, drawing")
    elif measurements is not None:
        with progress("fitting"):
            profile, quality = fit_folder(measurements, found)
        folder.save_profile(profile, out / "profile.json.gz")
    else:
        profile, quality = find_profile(gpu or ""), None
    profile = completed(profile)
    with progress("comparing, drawing"):
        compared = None if steps is None else compare_runs(steps, profile, warn=warn)  # needs torch
        page = assemble.build_report(profile, quality, out, measured=found.rows if found else (), compared=compared)
    over = page_index.keep(out, index, standard_gpus_of_all)
    if as_json:
        emit({"gpu": profile.gpu, "page": str(page), "index": over and str(over)})
    else:
        assemble.print_summary(profile, out)
        if over is not None:
            say(f"wrote {over}")
        say(f"open {page}")


def standard_gpus_of_all() -> Sequence[StandardGpu]:
    """The standard models on every known GPU, at the latest prices of the shipped book."""
    from flopcast.roofline.dollars.standard import standard_gpus
    from flopcast.roofline.gpu.catalogue.prices import latest, load_prices
    from flopcast.roofline.gpu.library.profiles import known

    book = load_prices()
    order = ("measured", "published", "projected")
    names = [entry.name for entry in sorted(known(), key=lambda entry: order.index(entry.basis)) if entry.name != "cpu"]
    prices = {name: price for name in names if (price := latest(book, name)) is not None}
    with progress("forecasting the standard models on every GPU"):
        return standard_gpus(names, prices)
