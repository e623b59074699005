"""Builds FLOPs-per-dollar curves: forecasts of the ladder on several GPUs, with their prices.

Errors that two GPUs' forecasts share cancel in their ratio as far as both forecasts depend on them
(`points.Ranged.over`). Shared are:

- the bias of an operation class (`step.uncertainty.Spreads.classes`: kernels measured in isolation against kernels
  within a step), where both profiles derive from one measured profile, by name. It was estimated on one H200; that it
  is the same on another part is an assumption, which moves a ratio's interval by a percentage point or two.
- the host, only when one host is said to feed both (`hosts` "same", or a host given by name). By default each GPU
  is in a machine of its own, and no host error cancels: the host costs of one rented machine varied between 0.76 and
  1.64 times the usual within minutes. "Same" means the one machine in which all their host costs were measured.

A projection's error and the fit's own errors are treated as not shared, though in truth they partly are. The interval
of a ratio is then too wide, never too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, log

from flopcast.errors import UsageError
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.dollars.points import HOST_FACTORS, CostCurve, Moves, StepPoint, cost_curve
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.profile.host import NO_HOST, HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import STEP, PricedStep, traced_of
from flopcast.roofline.step.uncertainty import spreads
from flopcast.roofline.stream.library.ahead import compile_ahead
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.library.streams import Vary, get_stream
from flopcast.roofline.stream.lowering.classes import group_of
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

OWN, SAME = "own", "same"  # the host that feeds each GPU: one of its own, or one for all
HOSTS = (OWN, SAME)


def cost_curves(
    profiles: Sequence[Profile],
    models: Sequence[Config | Module],
    run: Run,
    prices: Mapping[str, Price],
    *,
    host: HostCosts | None = None,
    hosts: str = OWN,
    what_if: bool = False,
    vary: Vary | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CostCurve]:
    """Returns one curve per profile over `models`, without a price where `prices` does not hold its GPU.

    `host` feeds all GPUs; without it each is fed by its profile's host, and `hosts` "same" says that these are one
    machine. `what_if` also forecasts the steps on other hosts (`HOST_FACTORS`). `vary` is passed to `get_stream`.
    Compiled steps that are not at hand are compiled first, several side by side, as `progress` tells.
    Raises UsageError for invalid models, and for "same" where the profiles' hosts are not one.
    """
    feeding = feeding_hosts(profiles, host, hosts)
    points: list[list[StepPoint]] = [[] for _ in profiles]
    if run.mode != "eager":
        steps = [
            (model, traced_of(run, profile))
            for model in models
            if not isinstance(model, Module)
            for profile in profiles
        ]
        compile_ahead(steps, progress)
        vary = vary or "width"  # of the eager steps whose optimizer and storages the compiled ones have
    total = len(profiles) * len(models)
    done = 0
    for model in models:
        at_hand: dict[str, tuple[Stream, Run]] = {}  # a stream serves every GPU of its kind
        for found, profile, (own, is_shared) in zip(points, profiles, feeding, strict=True):
            device = run.device_of(profile.device)
            if device not in at_hand:
                at_hand[device] = traced_step(model, run, profile, vary)
            step = PricedStep(*at_hand[device], profile, own)
            found.append(step_point(step, model, shares_host=is_shared, what_if=what_if))
            done += 1
            progress(done, total)
    return [
        cost_curve(profile.gpu, found, prices.get(profile.gpu), profile.basis)
        for profile, found in zip(profiles, points, strict=True)
    ]


def traced_step(model: Config | Module, run: Run, profile: Profile, vary: Vary | None = None) -> tuple[Stream, Run]:
    """Returns a step's stream, and the run with the batch and sequence length that were traced: a module's are its
    factory's own, unless `vary` says that the run's batch is one of many. Raises UsageError."""
    if not isinstance(model, Module):
        return get_stream(model, traced_of(run, profile), vary=vary), run
    device = run.device_of(profile.device)
    stream = model.at_batch(run, device, run.batch) if vary == "batch" else model.stream(run, device)
    return stream, run_of_stream(stream, run)


def feeding_hosts(profiles: Sequence[Profile], host: HostCosts | None, hosts: str) -> list[tuple[HostCosts, bool]]:
    """Returns for each profile the host that feeds it, and whether the same host feeds the others too.

    Raises UsageError for an unknown value of `hosts`, and for "same" where the profiles' hosts are not one."""
    if hosts not in HOSTS:
        raise UsageError(f"hosts {hosts!r}: valid are {', '.join(HOSTS)}")
    if host is not None:
        return [(host, True)] * len(profiles)
    own = [profile.host or NO_HOST for profile in profiles]
    if hosts == OWN:
        return [(one, False) for one in own]
    if len({one.name for one in own}) > 1:
        names = ", ".join(sorted({one.name for one in own}))
        raise UsageError(f"hosts 'same': these GPUs were measured in several hosts ({names}); name one with --host")
    return [(own[0], True)] * len(profiles)


def step_point(
    step: PricedStep, model: Config | Module, *, shares_host: bool = False, what_if: bool = False
) -> StepPoint:
    """Returns a step of `model` as a point of a curve, with how far each shared cause of error moves it."""
    found, timeline, device_sigma = step.forecast(), step.timeline, step.device_sigma
    base = found.step_seconds

    def moved(**factors: float) -> float:
        return log(timeline.step_seconds(**factors) / base)

    shared: dict[str, Moves] = {}
    if device_sigma:
        slope = (
            -moved(device_factor=exp(-Z_90 * device_sigma)) / (Z_90 * device_sigma),
            moved(device_factor=exp(Z_90 * device_sigma)) / (Z_90 * device_sigma),
        )
        for cause, sigma in class_sigmas(step).items():
            shared[cause] = (-slope[0] * Z_90 * sigma, slope[1] * Z_90 * sigma)
    for cause, sigma in step.host_sigmas.items() if shares_host else ():
        of = (
            step.run.layout.kinds if cause == STEP else []
        )  # the same step errs alike on any GPU, in another layout not
        if sigma:
            shared[" ".join((cause, *of))] = (
                moved(host_factor=exp(-Z_90 * sigma)), moved(host_factor=exp(Z_90 * sigma)),
            )  # fmt: skip
    others = {}
    for factor in HOST_FACTORS if what_if else ():
        seconds = timeline.step_seconds(host_factor=factor)
        down, up = base / found.step_seconds_low, found.step_seconds_high / base
        if not factor:  # without a host only the kernels' interval is left; with one the step's width is kept
            down, up = map(exp, step.device_moves)
        others[factor] = (seconds, seconds / down, seconds * up)
    return StepPoint(
        n_params=found.n_params,
        width=_width_of(model),
        depth=found.depth,
        step_seconds=base,
        low=found.step_seconds_low,
        high=found.step_seconds_high,
        flops_counted=found.flops_counted,
        tokens=step.run.tokens,
        fits=found.fits,
        shared=shared,
        bound=found.bound,
        device_seconds=found.device_seconds,
        host_seconds=found.host_seconds,
        needed_bytes=found.needed_bytes,
        memory_bytes=int(step.profile.device.get("memory_bytes") or 0),
        num_gpus=found.num_gpus,
        with_host=others,
    )


def _width_of(model: Config | Module) -> int | None:
    if isinstance(model, Module):
        return model.sizes.get("width")
    return model.get("hidden_size") or model.get("n_embd")


def class_sigmas(step: PricedStep) -> dict[str, float]:
    """Returns the standard deviation of the log device time due to the bias of each group of classes, by
    "origin/group", where the origin is the measured profile that this one derives from."""
    known = spreads()
    origin = step.profile.provenance.get("projected_from") or step.profile.gpu
    total = step.timeline.device_seconds
    seconds: dict[str, float] = {}
    for op in step.ops:
        if op.work is not None:
            group = group_of(op.work.op_class)
            seconds[group] = seconds.get(group, 0.0) + op.seconds
    return {f"{origin}/{group}": value / total * known.of_group(group) for group, value in seconds.items() if total}
