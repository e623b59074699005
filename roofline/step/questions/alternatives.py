"""Forecasts alternatives that could make a step faster, each in the same way as the step itself; none is guessed.

An alternative is another op stream, another backend, or no host. A stream that is neither shipped nor cached has to be
traced, which needs torch and transformers and takes seconds; that is done only on request (`trace=True`), and otherwise
the alternative is named without a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from flopcast.errors import FlopcastError
from flopcast.kernels.shapes import Operand
from flopcast.microbench.recipe.settings import ATTENTIONS
from flopcast.roofline.gpu.profile.host import NO_HOST, HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
from flopcast.roofline.stream.model.models import Config, has_windows
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef, packet

BATCH_FACTOR = 4
BOUND_OF = "a bound of CUDA graphs and of what compile saves on the host; no forecast of compile, which also fuses"
MULTIPLES = (64, 128, 256)
_SIZES = {"hidden_size": "--width", "intermediate_size": "--ffn", "vocab_size": "--vocab"}
_FUSED_KWARGS = (
    '{"lr":0.001,"beta1":0.9,"beta2":0.999,"weight_decay":0.01,"eps":1e-08,"amsgrad":false,"maximize":false}'
)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One alternative. `kind`: forecast, bound (a limit that nothing here promises to reach), or left out.

    `gain`: the relative change in tokens per second against the step as it is, 0.1 for 10% more; `flops_gain`: the same
    for counted FLOPs per second, which distinguishes a faster step from a smaller model, and None for a step that
    counts no FLOPs. All figures are None where the alternative was not forecast (`reason` says why).
    """

    name: str
    option: str
    kind: str
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    device_seconds: float | None = None
    tokens_per_second: float | None = None
    gain: float | None = None
    flops_gain: float | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Candidate:
    name: str
    option: str
    run: Run
    make: Callable[[], Stream] | None  # None: it has to be traced first
    kind: str = "forecast"
    host: HostCosts | None = None  # None: the step's own host


def advise(step: PricedStep, *, config: Config | None = None, trace: bool = False) -> list[Advice]:
    """Returns alternatives to a step and what they gain, best first; those that were not forecast come last.

    Without `config` (for a user's own module) only alternatives that the step's own stream allows are considered. An
    alternative that is not possible raises nothing: its `reason` says why.
    """
    advice = [_forecast(candidate, step) for candidate in _candidates(step, config, trace)]
    return sorted(advice, key=lambda a: (a.gain is None, a.kind != "forecast", -(a.gain or 0.0)))


def _checked(run: Run, stream: Stream) -> None:
    """Raises UsageError for a run that is not possible. Precision and optimizer of a step function are its own, as its
    stream has them, and no options."""
    own = stream.meta.get("unit") == "steps"
    (replace(run, precision=Run.precision, optimizer=Run.optimizer) if own else run).check()


def _forecast(candidate: _Candidate, step: PricedStep) -> Advice:
    def left_out(reason: str) -> Advice:
        return Advice(name=candidate.name, option=candidate.option, kind="left out", reason=reason)

    if candidate.make is None:
        return left_out("its op stream has to be traced first: --what-if")
    try:
        _checked(candidate.run, step.stream)
        host = candidate.host or step.host
        other = PricedStep(candidate.make(), candidate.run, step.profile, host).forecast()
    except FlopcastError as fault:
        return left_out(str(fault))
    found = step.forecast()
    if other.step_seconds <= 0 or found.step_seconds <= 0:
        return left_out("a step of no time")
    flops = None  # of a step without products and attention
    if found.flops_counted:
        flops = (other.flops_counted / other.step_seconds) / (found.flops_counted / found.step_seconds) - 1
    return Advice(
        name=candidate.name,
        option=candidate.option,
        kind=candidate.kind,
        step_seconds=other.step_seconds,
        step_seconds_low=other.step_seconds_low,
        step_seconds_high=other.step_seconds_high,
        device_seconds=other.device_seconds,
        tokens_per_second=other.tokens_per_second,
        gain=other.tokens_per_second / found.tokens_per_second - 1,
        flops_gain=flops,
        peak_bytes=other.peak_bytes,
        fits=other.fits,
        reason=BOUND_OF if candidate.kind == "bound" else "" if other.fits else "does not fit into memory",
    )


def _candidates(step: PricedStep, config: Config | None, trace: bool) -> Iterator[_Candidate]:
    stream, run, profile = step.stream, step.run, step.profile

    def own() -> Stream:
        return stream

    is_cpu = profile.device.get("type") == "cpu"
    # a bound for eager steps; of compiled ones `modes` has the forecast with CUDA graphs
    if not is_cpu and step.host_costs.name != NO_HOST.name and run.mode == "eager":
        yield _Candidate("no host", "--host none", run, own, "bound", NO_HOST)
    if run.optimizer == "adamw" and not is_cpu and (fused := with_fused_adamw(stream)) is not None:
        yield _Candidate(
            "fused optimizer", "--optimizer adamw-fused", replace(run, optimizer="adamw-fused"), lambda: fused
        )
    for backend in measured_backends(profile, stream, run):
        changed = replace(run, attention=backend)
        make: Callable[[], Stream] | None = own
        if config is not None and has_windows(config, run.seq):  # whose streams differ by attention
            make = _ready(config, changed, profile, trace)
        yield _Candidate(f"attention by {backend}", f"--attention {backend}", changed, make)
    if run.matmul != "triton" and any((key.backend, key.op_class) == ("triton", "gemm") for key in profile.surfaces):
        yield _Candidate("matmul by Triton", "--matmul triton", replace(run, matmul="triton"), own)
    if config is None:
        return
    if run.clip and run.optimizer in ("adamw", "adamw-fused") and not is_cpu:
        changed = replace(run, optimizer="adamw-triton")
        yield _Candidate(
            "clipping inside AdamW", "--optimizer adamw-triton", changed, _ready(config, changed, profile, trace)
        )
    for name, option, other, changed in _traced_candidates(run, config):
        yield _Candidate(name, option, changed, _ready(other, changed, profile, trace))


def _ready(config: Config, run: Run, profile: Profile, trace: bool) -> Callable[[], Stream] | None:
    """What gives the op stream, where it is at hand or may be traced."""
    traced = traced_of(run, profile)
    is_ready = trace or is_at_hand(config, traced, vary="batch")
    return partial(get_stream, config, traced, vary="batch") if is_ready else None


def _traced_candidates(run: Run, config: Config) -> Iterator[tuple[str, str, Config, Run]]:
    """Yields (name, option, config, run) of the alternatives that need another op stream."""
    batch = run.batch * BATCH_FACTOR
    yield f"batch {batch}", f"--batch {batch}", config, replace(run, batch=batch)
    accumulate = run.accumulate * BATCH_FACTOR
    yield (f"accumulate {accumulate}", f"--accumulate {accumulate}", config, replace(run, accumulate=accumulate))
    faster = {"fp32": ("tf32", "autocast-bf16"), "tf32": ("autocast-bf16",), "autocast-fp16": ("autocast-bf16", "bf16"),
              "autocast-bf16": ("bf16",), "bf16": ()}  # fmt: skip
    for precision in faster.get(run.precision, ()):
        yield f"precision {precision}", f"--precision {precision}", config, replace(run, precision=precision)
    for field, option in _SIZES.items():
        for size in nearest_multiples(int(config.get(field) or 0), is_vocabulary=field == "vocab_size"):
            yield f"{field} {config[field]} to {size}", f"{option} {size}", {**config, field: size}, run


def nearest_multiples(size: int, *, is_vocabulary: bool = False) -> list[int]:
    """Returns the multiples of 64, 128 and 256 nearest to `size`, without `size` itself; for a vocabulary, which cannot
    shrink, the nearest above it."""
    if size <= 0:
        return []
    found = []
    for step in MULTIPLES:
        below, above = size // step * step, -(-size // step) * step
        nearest = above if is_vocabulary or below == 0 or above - size <= size - below else below
        if nearest != size and nearest not in found:
            found.append(nearest)
    return found


def measured_backends(profile: Profile, stream: Stream, run: Run) -> list[str]:
    """Returns the attention backends that may be asked for and that the profile measured in the dtype of the step's
    attention, except the one in use; none for a step without attention."""
    calls = [op for op in stream.ops if "attention" in packet(op.name) and op.outputs]
    # fp16 runs bf16's kernels for the other 16 bits (`variants.twin_of`)
    dtypes = {stream.tensors[op.outputs[0]].operand.dtype.replace("fp16", "bf16") for op in calls}
    current = profile.default_attention if run.attention == "sdpa" else run.attention
    names = {
        key.backend
        for key in profile.surfaces
        if key.op_class == "attention" and key.variant.dtypes.replace("fp16", "bf16") in dtypes
    }
    return sorted(names & {*ATTENTIONS} - {current})


def with_fused_adamw(stream: Stream) -> Stream | None:
    """Returns the stream with torch's foreach AdamW replaced by its fused AdamW, as a trace of that would give it.

    None where the optimizer is not a foreach AdamW whose tensor lists can be recognised.
    """
    ops = [op for op in stream.ops if op.phase == "optimizer"]

    def named(name: str) -> list[Op]:
        return [op for op in ops if packet(op.name) == f"aten.{name}"]

    averages, squares, updates = (named("_foreach_lerp_"), named("_foreach_addcmul_"), named("_foreach_addcdiv_"))
    if not averages or not len(averages) == len(squares) == len(updates):
        return None
    tensors, storages = list(stream.tensors), list(stream.storages)
    made: list[Op] = []
    for average, square, update in zip(averages, squares, updates, strict=True):
        n = len(average.inputs) // 2
        if len(average.inputs) != 2 * n or len(square.inputs) != 2 * n or len(update.inputs) != 3 * n:
            return None
        steps = range(len(tensors), len(tensors) + n)
        for _ in steps:
            tensors.append(TensorRef(Operand((), (), "fp32"), len(storages)))
            storages.append(Storage(4, "state"))
        gradients, parameters = average.inputs[n:], update.inputs[:n]
        inputs = (*parameters, *gradients, *average.inputs[:n], *square.inputs[:n], *steps)
        lists = ",".join(f'{{"ts":[{i * n},{n}]}}' for i in range(4))
        made += [
            Op("aten._foreach_add_.Scalar", "optimizer", tuple(steps), (), tuple(range(n)), f'[{{"ts":[0,{n}]}},1]'),
            Op("aten._fused_adamw_.default", "optimizer", inputs, (), tuple(range(4 * n)),
               f'[{lists},[],{{"ts":[{4 * n},{n}]}}]', _FUSED_KWARGS),
        ]  # fmt: skip
    freed = tuple(storage for op in ops for storage in op.freed)
    made[0] = made[0]._replace(freed=freed)
    rest = tuple(op for op in stream.ops if op.phase != "optimizer")
    return replace(stream, ops=rest + tuple(made), tensors=tuple(tensors), storages=tuple(storages), repeats=(),
                   meta={**stream.meta, "optimizer": "adamw-fused"})  # fmt: skip
