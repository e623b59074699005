"""`flopcast bench`: measures this machine. Imports `microbench`, and with it torch, only when it runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared.groups import Only
from flopcast.roofline.cli.shared.options import AsJson, Budget, Device, ModelOptions, Out, Retry, given
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.gpu.suites import SuiteCase
    from flopcast.roofline.step import measured_model

BACKENDS = ("torch", "triton", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")  # backends of a suite's cases


def bench(
    context: Context,
    suite: Annotated[
        str | None,
        Option(
            help="Suite: quick (a minute; the default), standard (six minutes), full (twenty), fused, attention, "
            "products or optimizers (Triton's fused kernels, its attention, its products beside cuBLAS's, its AdamW, a "
            "minute each), host (what "
            "launches cost), or collectives (what joins the GPUs: all of them together, two to four minutes)."
        ),
    ] = None,
    device: Device = None,
    out: Out = Path("out"),
    retry: Retry = False,
    *,
    all_gpus: Annotated[
        bool, Option("--all-gpus", help="Measure each GPU of this host, side by side, into OUT/gpu0, OUT/gpu1, ...")
    ] = False,
    budget: Budget = None,
    backend: Annotated[
        str | None,
        Option(help="Measure only the suite's cases of this backend, such as triton after its kernels were changed."),
    ] = None,
    model: Annotated[ModelOptions, Only("config", "module", "depth")],
    run: Annotated[
        Run,
        Only(
            "batch",
            "seq",
            "accumulate",
            "checkpoint",
            "precision",
            "optimizer",
            "matmul",
            "attention",
            "fused",
            "clip",
            "finetune",
            "lora_rank",
            "lora_targets",
            "base_dtype",
        ),
    ],
    skip_host: Annotated[bool, Option("--skip-host", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Measures this machine: ceilings, host cost, kernels. Appends as it goes; run again to resume.

    With --config or --module it measures exactly what a step of that model launches, in place of a suite.
    """
    from flopcast.child import end_with_parent
    from flopcast.roofline.cli.gpu import all_gpus as gpu_all_gpus
    from flopcast.roofline.cli.gpu.collectives import bench_collectives
    from flopcast.roofline.cli.shared.output import emit
    from flopcast.roofline.cli.shared.stopped import resumable
    from flopcast.roofline.gpu.suites import COLLECTIVES
    from flopcast.roofline.step.measured_model import model_options
    from flopcast.roofline.views.terminal.console import say
    from flopcast.roofline.views.terminal.fit import print_spread

    step = model_options(given(context, model, run))
    if step is not None and backend is not None:
        raise UsageError(
            f"--backend {backend} is of a suite: which a step of a model runs, --matmul and --attention say"
        )
    if step is not None and suite is not None:
        raise UsageError(f"--suite and a model are two sweeps: run one, then the other, into --out {out}")
    if suite == COLLECTIVES:
        if step is not None or backend is not None or all_gpus:
            raise UsageError(
                f"--suite {COLLECTIVES} takes all GPUs together, and no cases: leave out "
                f"{'--all-gpus' if all_gpus else '--backend' if backend else 'the model'}"
            )
        bench_collectives(out, device, budget, ("oom", "error") if retry else (), as_json)
        return
    if all_gpus:
        if device is not None:
            raise UsageError(f"--device {device} with --all-gpus: one GPU or all of them")
        _check_bench(suite, budget, backend)
        limits = () if budget is None else ("--budget", str(budget))
        of_backend = () if backend is None else ("--backend", backend)
        arguments = (*limits, *of_backend, *(("--retry",) if retry else ()), *(step.arguments if step else ()))
        with resumable(out):
            found = gpu_all_gpus.bench_all_gpus(out, suite, arguments)
        if as_json:
            emit(found)
        elif found["spread"]:
            print_spread(found["spread"])
        gpu_all_gpus.raise_if_failed(found)
        say(f"`flopcast fit {out}` makes a profile of them")
        return
    end_with_parent()
    with resumable(out):
        summaries = run_bench(
            device, suite or "quick", out, model=step, budget=budget, retry=("oom", "error") if retry else (),
            skip_host=skip_host, backend=backend,
        )  # fmt: skip
    for part, text in summaries.items():
        say(f"{part}: {text}")
    if as_json:
        emit({"out": str(out), "parts": summaries})
    else:
        say(f"`flopcast fit {out}` makes a profile of it")


def _check_bench(suite: str | None, budget: float | None, backend: str | None = None) -> None:
    from flopcast.roofline.gpu.suites import COLLECTIVES, HOST, SUITES, check_suite

    check_suite(suite or "quick", (*SUITES, HOST, COLLECTIVES))
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"--backend {backend!r}: valid are {', '.join(BACKENDS)}")
    if backend is not None and suite == HOST:
        raise UsageError(f"--backend {backend} with --suite host, which has no cases: leave one of the two out")
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget is {budget:g}: valid are seconds, 0 or more")


def run_bench(
    device: str | None, suite: str, out: Path, *, model: measured_model.ModelOptions | None = None,
    budget: float | None = None, retry: tuple[str, ...] = (), skip_host: bool = False, backend: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Measures what `out` lacks of a suite (with `backend`, only its cases), or of the kernels that a step of `model`
    launches. Returns a summary line per part."""
    _check_bench(suite, budget, backend)
    from flopcast.microbench import bench as engine
    from flopcast.microbench.sweep.cases import Case
    from flopcast.microbench.timing.device import describe, pick_device
    from flopcast.roofline.cli.gpu import all_gpus as gpu_all_gpus
    from flopcast.roofline.gpu import suites
    from flopcast.roofline.gpu.fit import host_calibration
    from flopcast.roofline.step import measured_model

    chosen = pick_device(device)
    gpu_all_gpus.check_out(out)
    host_only = suite == suites.HOST
    of_triton = suite in suites.OF_TRITON and model is None
    if of_triton and chosen.type != "cuda":
        raise UsageError(f"suite {suite!r} on {chosen.type}: Triton's kernels run on a CUDA GPU")
    # "full" takes the policy of "standard": 91% of an H200's rows end after 10 samples that agree to 0.5%, less than
    # two runs differ by. More samples would add a quarter of the time and no information; more shapes do add some.
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
        own = model.model(chosen.type)
        machine = describe(chosen)
        name = own.label
        listed = measured_model.cases_kept(
            out, own, measured_model.step_cases(own, machine["device"], machine["stack"])
        )
    cases = (Case(shape=c.shape, backend=c.backend, cache=c.cache, role=c.role) for c in listed)
    plans = [host_calibration.host_plan(chosen.type)]
    if host_only and chosen.type == "cuda":
        plans += host_calibration.compiled_host_plans()
    found = engine.run_bench(
        chosen, out, suite=name, policy=policy, cases=cases, hosts=plans, budget_seconds=budget, retry=retry,
        host_only=host_only,
        calibrate=not skip_host and not of_triton and backend is None,
        operators=not skip_host and backend is None and (host_only or suite in (suites.FUSED, "full")),
    )  # fmt: skip
    return {part: "; ".join([str(summary), *summary.warnings]) for part, summary in found.items()}
