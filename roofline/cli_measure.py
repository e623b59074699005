"""The commands that measure this machine and digest its measurements: bench and fit.

They import `microbench`, and with it torch, only when they run.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopcast.errors import UsageError

if TYPE_CHECKING:
    from flopcast.roofline.cards import Found
    from flopcast.roofline.direct import Asked
    from flopcast.roofline.fit_report import FitReport
    from flopcast.roofline.profile import Profile
    from flopcast.roofline.suite_case import SuiteCase

SUITES = ("quick", "standard", "full", "fused", "attention")
BACKENDS = ("torch", "triton", "sdpa-flash", "sdpa-cudnn")  # of a suite's cases

Device = Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu; default: cuda where there is one.")]
Suite = Annotated[
    str | None,
    typer.Option(
        help="quick (a minute; the default), standard, or fused: patched with the fused kernels alone."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder to write to; what it holds already is not done again.")]
Retry = Annotated[bool, typer.Option("--retry", help="Measure again what failed or ran out of memory.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for command in (bench, fit):
        app.command()(command)


def bench(
    suite: Annotated[str | None, typer.Option(
        help="quick (a minute; the default), standard (six minutes), full (twenty), fused, attention: Triton's "
        "fused kernels or its attention alone (a minute each), or host: what launches cost, alone."
    )] = None,
    device: Device = None, out: Out = Path("out"), retry: Retry = False,
    all_gpus: Annotated[bool, typer.Option(
        "--all-gpus", help="Each GPU of this host, side by side, into OUT/gpu0, OUT/gpu1, ..."
    )] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds for the sweep; the next run continues.")] = None,
    backend: Annotated[str | None, typer.Option(
        help="Of a suite only the cases of this backend, without the host: triton after its kernels were changed."
    )] = None,
    config: Annotated[str | None, typer.Option(
        help="Instead of a suite, exactly what a step of this model launches: a config.json, or a shipped name."
    )] = None,
    module: Annotated[str | None, typer.Option(
        help="As --config, for any module: package.module:factory, which returns (module, batch)."
    )] = None,
    depth: Annotated[int | None, typer.Option(help="Layers of --config.")] = None,
    batch: Annotated[int | None, typer.Option(help="Of the model: sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(help="Of the model: tokens a sequence.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Of the model: micro-batches a step.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of the model: none or full.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of the model, as for predict.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Of the model, as for predict.")] = None,
    matmul: Annotated[str | None, typer.Option(help="Of the model: torch or triton.")] = None,
    attention: Annotated[str | None, typer.Option(help="Of the model, as for predict.")] = None,
    fused: Annotated[str | None, typer.Option(help="Of the model, as for predict.")] = None,
    skip_host: Annotated[bool, typer.Option("--skip-host", hidden=True)] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measures this machine: ceilings, host cost, kernels. Appends as it goes; run again to resume."""
    from flopcast.microbench import fanout
    from flopcast.roofline import cli_bench, direct
    from flopcast.roofline.cli import emit
    from flopcast.roofline.tables import say

    model = direct.asked({
        "config": config, "module": module, "depth": depth, "batch": batch, "seq": seq, "accumulate": accumulate,
        "checkpoint": checkpoint, "precision": precision, "optimizer": optimizer, "matmul": matmul,
        "attention": attention, "fused": fused,
    })  # fmt: skip
    if model is not None and backend is not None:
        raise UsageError(
            f"--backend {backend} is of a suite: which a step of a model runs, --matmul and --attention say"
        )
    if model is not None and suite is not None:
        raise UsageError(f"--suite and a model are two sweeps: run one, then the other, into --out {out}")
    if all_gpus:
        if device is not None:
            raise UsageError(f"--device {device} with --all-gpus: one GPU or all of them")
        _check_bench(suite, budget, backend)
        limits = () if budget is None else ("--budget", str(budget))
        of_backend = () if backend is None else ("--backend", backend)
        arguments = (
            *limits,
            *of_backend,
            *(("--retry",) if retry else ()),
            *(model.arguments if model else ()),
        )
        found = cli_bench.bench_all_gpus(out, suite, arguments)
        if as_json:
            emit(found)
        elif found["spread"]:
            cli_bench.print_spread(found["spread"])
        cli_bench.raise_if_failed(found)
        say(f"`flopcast fit {out}` makes a profile of them")
        return
    fanout.end_with_parent()
    summaries = run_bench(
        device, suite or "quick", out, model=model, budget=budget, retry=("oom", "error") if retry else (),
        skip_host=skip_host, backend=backend,
    )  # fmt: skip
    for part, text in summaries.items():
        say(f"{part}: {text}")
    if as_json:
        emit({"out": str(out), "parts": summaries})
    else:
        say(f"`flopcast fit {out}` makes a profile of it")


def check_suite(suite: str, valid: tuple[str, ...] = SUITES) -> None:
    if suite not in valid:
        raise UsageError(f"suite {suite!r}: valid are {', '.join(valid)}")


def _check_bench(suite: str | None, budget: float | None, backend: str | None = None) -> None:
    check_suite(suite or "quick", (*SUITES, "host"))
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"--backend {backend!r}: valid are {', '.join(BACKENDS)}")
    if backend is not None and suite == "host":
        raise UsageError(
            f"--backend {backend} with --suite host, which has no cases: leave one of the two out"
        )
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget is {budget:g}: valid are seconds, 0 or more")


def run_bench(
    device: str | None, suite: str, out: Path, *, model: Asked | None = None, budget: float | None = None,
    retry: tuple[str, ...] = (), skip_host: bool = False, backend: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Measures what `out` lacks of a suite (with `backend`, of its cases), or of what a step of `model` launches; a
    line for each part."""
    _check_bench(suite, budget, backend)
    from flopcast.microbench import bench as engine
    from flopcast.microbench.device import describe, pick_device
    from flopcast.microbench.sweep import Case
    from flopcast.roofline import calibration, cli_bench, direct
    from flopcast.roofline import suite as suites

    chosen = pick_device(device)
    cli_bench.check_out(out, all_gpus=False)
    host_only = suite == cli_bench.HOST_SUITE
    of_triton = suite in suites.OF_TRITON and model is None
    if of_triton and chosen.type != "cuda":
        raise UsageError(f"suite {suite!r} on {chosen.type}: Triton's kernels run on a CUDA GPU")
    # "full" takes the policy of "standard": 91% of an H200's rows end after 10 samples that agree to 0.5%, below
    # what two runs differ by, so that more of the same adds a quarter of the time and nothing else; shapes do.
    brief = chosen.type == "cpu" or host_only or (suite == "quick" and model is None)
    policy = "quick" if brief else "standard"
    name = "cpu-quick" if chosen.type == "cpu" and not host_only else suite
    if host_only:
        listed: Iterable[SuiteCase] = ()
    elif model is None:
        listed = [case for case in suites.load(name) if backend in (None, case.backend)]
        if not listed and backend is not None:
            raise UsageError(f"--backend {backend}: suite {name!r} has no case of it; standard and full have")
    else:
        source = model.source(chosen.type)
        machine = describe(chosen)
        name = source.label
        listed = direct.cases_kept(
            out, source, direct.step_cases(source, machine["device"], machine["stack"])
        )
    cases = (Case(shape=c.shape, backend=c.backend, cache=c.cache, role=c.role) for c in listed)
    found = engine.run_bench(
        chosen, out, suite=name, policy=policy, cases=cases,
        hosts=[calibration.host_plan(chosen.type)], budget_seconds=budget, retry=retry, host_only=host_only,
        calibrate=not skip_host and not of_triton and backend is None,
        operators=not skip_host and backend is None and (host_only or suite in (suites.FUSED, "full")),
    )  # fmt: skip
    return {part: "; ".join([str(summary), *summary.warnings]) for part, summary in found.items()}


def fit(
    folder: Annotated[Path, typer.Argument(help="Folder that `flopcast bench` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Profile to write; default: FOLDER/profile.json.gz.")
    ] = None,
    repeat: Annotated[
        Path | None, typer.Option(help="A second run of the suite: compared row by row -> repeatability.csv.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turns measurements into a profile and prints how well it fits, on rows it never saw too."""
    from dataclasses import asdict

    _one_blas_thread()
    from flopcast.roofline import cards, cli_bench, coverage, host_folder, repeatability, tables
    from flopcast.roofline.cli import emit
    from flopcast.roofline.text_files import check_writable
    from flopcast.roofline.waiting import waiting

    check_writable(out)
    with waiting("reading"):
        found = cards.read_folder(folder)
    if host_folder.is_host_only(found):
        host, path = cli_bench.fit_host_only(folder, found, out)
        if as_json:
            emit({"profile": None, "host_file": str(path), "host": asdict(host)})
        else:
            cli_bench.print_host(host)
            kept = f", or as --host {host.name} unless that ships" if host.basis == "measured" else ""
            tables.say(f"wrote {path}; use it as --host {path}{kept}")
        return
    with waiting("fitting"):
        repeated = None if repeat is None else repeatability.compare_folders(folder, repeat)
        profile, quality = fit_folder(folder, found)
    path = out or folder / "profile.json.gz"
    save_profile(profile, path)
    host_file = cli_bench.save_host(profile.host, cli_bench.host_path(path, is_default=out is None))
    if repeated is not None:
        repeatability.write_csv(repeated, path.with_name("repeatability.csv"))
    gpus = profile.provenance.get("gpus")
    if as_json:
        holds = {name: profile.provenance[name] for name in ("shapes", "sources")}
        host_name = None if profile.host is None else profile.host.name
        emit({
            "profile": str(path), "gpu": profile.gpu, "host_file": host_file and str(host_file), "host": host_name,
            "gpus": gpus, "repeatability": repeated and repeated.to_json(), **holds, **quality.to_json(),
        })  # fmt: skip
    else:
        tables.print_fit(quality)
        if gpus:
            cli_bench.print_spread(gpus)
        if profile.host is not None and profile.host.layers:
            cli_bench.print_host(profile.host)
        if repeated is not None:
            repeatability.show(repeated, tables.say)
        tables.say(coverage.holdings(profile))
        if host_file is not None:
            tables.say(f"wrote {host_file}: this host, for --host")
        tables.say(f"wrote {path}; use it as --gpu {path}, or as --gpu {profile.gpu} unless that ships")


def _one_blas_thread() -> None:
    """Loads numpy and scipy with one thread of BLAS each, unless the caller said how many or they are there.

    A fit is thousands of products and factorisations of tens of points, between which OpenBLAS's threads spin: with two
    on two cores, 194 surfaces took 63 s of processor time, with one 11 s."""
    name = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or name in os.environ or "OMP_NUM_THREADS" in os.environ:
        return
    os.environ[name] = "1"
    try:
        importlib.import_module("scipy.optimize")
    finally:
        del os.environ[name]  # what a process started from here does is its own


def fit_folder(folder: Path, found: Found | None = None) -> tuple[Profile, FitReport]:
    """The profile of a folder of measurements, host costs included; of several GPUs that of the median card."""
    from flopcast.roofline import calibration, cards, coverage, direct
    from flopcast.roofline.fit import fit_rows

    found = found or cards.read_folder(folder)
    machine = found.machine
    kind = machine["device"]["type"]
    plan = calibration.host_plan(kind)
    rows, n_promoted = direct.promote(found.rows, direct.kept(found.home), machine)
    warnings = list(found.warnings)
    if n_promoted:
        warnings.append(f"{n_promoted} held-out rows are what --config asked for: fitted, they judge no more")
    profile, quality = fit_rows(
        rows, machine, counts=calibration.host_counts(plan, kind), warnings=warnings, name=str(folder)
    )
    if kind == "cpu":
        profile = profile.with_host(calibration.synchronous_host(profile, plan, rows) or profile.host)
    return cards.with_cards(coverage.with_sources(profile, found.home, rows), found), quality


def save_profile(profile: Profile, path: Path) -> None:
    """Writes the profile, and a copy where `--gpu NAME` finds it. Raises UsageError when it cannot be written."""
    from flopcast.roofline.lookup import user_folder

    make_folder(path.parent)
    profile.save(path)
    try:
        user_folder().mkdir(parents=True, exist_ok=True)
        profile.save(user_folder() / f"{profile.gpu}.json.gz")
    except (OSError, UsageError):  # a read-only home: the profile asked for is written
        pass


def make_folder(folder: Path) -> None:
    """Raises UsageError when it cannot be made, or what is there cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as fault:
        raise UsageError(f"{folder} cannot be written: {fault.strerror}; choose another --out") from fault
