"""Forecasts one step from an op stream, how it is run, a GPU's profile and the host that feeds it.

    step = PricedStep(stream, run, profile)
    step.forecast()                    # the record that `predict` prints
    step.timeline.step_seconds(...)    # the step on another host, with other gaps, ...

Each part is computed once, when it is first asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, hypot, sqrt
from typing import Any

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.recipe.settings import QUANTISED
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.base.units import ms
from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.links.library import find_interconnect
from flopcast.roofline.gpu.profile.host import NO_HOST, HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.unlike_bytes import rule_of
from flopcast.roofline.step.communication import CALLS_SIGMA, Fabric, calls_around, on_lanes, slowest_host_factor
from flopcast.roofline.step.device_work import DeviceTimes, TimedOp, bound_seconds, device_times, device_work
from flopcast.roofline.step.forecast import ClassShare, Forecast
from flopcast.roofline.step.inference import memory_parts, turning_batch
from flopcast.roofline.step.memory.needed import first_bucket_bytes, holds_first_buckets, needed_bytes
from flopcast.roofline.step.memory.peak import Target, peak_bytes, peak_parts, reserved_bytes
from flopcast.roofline.step.power_limit import Draw, draw_of
from flopcast.roofline.step.simulation import is_synchronous
from flopcast.roofline.step.timeline import Timeline
from flopcast.roofline.step.uncertainty import (
    Interval,
    Moves,
    device_log_sigma,
    device_moves,
    is_rough,
    own_variances,
    spreads,
    step_interval,
)
from flopcast.roofline.step.unsure_pads import UnsurePad, unsure_pads_of, with_expected_seconds
from flopcast.roofline.stream.compiled.versions import version_note
from flopcast.roofline.stream.library.streams import Trace, get_stream
from flopcast.roofline.stream.lowering.classes import OP_CLASSES, PRODUCTS, group_of
from flopcast.roofline.stream.lowering.conv_1x1 import wholes_of
from flopcast.roofline.stream.lowering.six_n import Parameters, count_parameters
from flopcast.roofline.stream.lowering.variants import KernelKind, twin_of
from flopcast.roofline.stream.model.run import PEAK_OF, Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream

_EXPERTS = "experts"  # what expert parallel divides, by the names that transformers gives modules
HOST, CALLS, STEP = "host", "calls", "step"  # causes of the host's error
COMPILED_RANKS = (
    "35 compiled steps on several GPUs were measured, on two and four H200s: all lie in their intervals. Of six to "
    "which no constant was fitted the forecast with the shipped host is off by 7% at the median, by 26% at most, of "
    "twenty-three larger ones by 3% at the median, by 14% at most"
)
UNTIMED = "no {} was timed yet as a whole: its time adds up what its kernels are forecast to take"
BITSANDBYTES = (
    "of ten steps with kernels of bitsandbytes on an H200 the host took 1.2 to 1.6 times as long as forecast, and more "
    "with its AdamW: where the host bounds, as in about half of them, the step comes out low, by up to 36%"
)
# Graphs of a micro-batch from which on its layers break: models compiled whole have 2 to 4.
MANY_GRAPHS = 16
MANY_GRAPHS_TOLD = (
    "the step enters {} compiled graphs, as one does whose layers break: four such steps that the host bounds, of "
    "mixtures of experts, were forecast 11 to 26% short"
)
# The same whatever host feeds it.
_OF_THE_DEVICE = ("device_times", "unsure_pads", "device_moves", "draw", "peak_bytes")
WORTH_A_WARNING = 0.02  # share of the device time in kernels that were not measured


@dataclass(frozen=True)
class PricedStep:
    """A training step on one device. `host` None means the profile's host, if any: the shipped one
    unless the user measured the profile."""

    stream: Stream
    run: Run
    profile: Profile
    host: HostCosts | None = None
    price: Price | None = None

    @cached_property
    def host_costs(self) -> HostCosts:
        """Of several ranks those of the slowest one's host."""
        host = self.host or self.profile.host or NO_HOST
        return host.scaled(slowest_host_factor(self.run.layout.world)) if self.run.is_parallel else host

    @cached_property
    def fabric(self) -> Fabric | None:
        """What joins the ranks of a step on several GPUs. Raises UsageError where no link of the GPU is known."""
        if not self.run.is_parallel:
            return None
        link = find_interconnect(self.profile.gpu if self.run.link == "auto" else self.run.link)
        return Fabric(link, self.run.layout.world // self.run.hosts)

    @property
    def mode(self) -> str:
        return str(self.stream.meta.get("mode", "eager"))

    @property
    def host_sigma(self) -> float:
        """The standard deviation of the log of the host's seconds."""
        return hypot(*self.host_sigmas.values())

    @property
    def host_sigmas(self) -> dict[str, float]:
        """The standard deviation of the log of the host's seconds by cause: HOST, the host's costs, which err alike in
        all steps that it feeds; CALLS, what calls around collectives cost; STEP, how far steps are from a host that is
        known."""
        host, own = self.host_costs, spreads(self.mode).host_same_run
        of_graphs = hypot(host.graph_costs(self.mode).sigma, own) if self.stream.meta.get("graphs") else 0.0
        calls = 0.0
        whole = of_graphs or host.sigma
        if self.fabric is not None and self.timeline.host_seconds:
            whole = max(host.sigma, of_graphs)
            around = sum(calls_around(self.stream).values()) * host.seconds("forward", "launch")
            calls = CALLS_SIGMA * around / self.timeline.host_seconds
        own = min(own, whole)
        return {HOST: sqrt(whole**2 - own**2), CALLS: calls, STEP: own}

    @cached_property
    def ops(self) -> list[TimedOp]:
        """The stream's operations, in order, with their device and host seconds."""
        ops = with_expected_seconds(self._as_generated, self.unsure_pads)
        return ops if self.fabric is None else on_lanes(self.stream, ops, self.fabric, self.host_costs)

    @cached_property
    def _as_generated(self) -> list[TimedOp]:
        """The operations as the generated code has them, all products padded that it pads."""
        return device_work(self.stream, self.run, self.profile, self.host_costs, self.device_times)

    @cached_property
    def unsure_pads(self) -> dict[int, UnsurePad]:
        """What another run may leave unpadded."""
        return unsure_pads_of(self._as_generated, self.stream.meta.get("unsure_pads", ()), self.profile)

    @property
    def stages(self) -> tuple[PricedStep, ...]:
        """The steps of a pipeline's stages, of which this one is the last; itself where there is none."""
        return (*self._stages_before, self)  # not kept: a step that holds itself waits for a collection of garbage

    @cached_property
    def _stages_before(self) -> tuple[PricedStep, ...]:
        return tuple(replace(self, stream=stream) for stream in self.stream.stages_before)

    @cached_property
    def device_times(self) -> DeviceTimes:
        return device_times(self.stream, self.run, self.profile)

    def on_host(self, host: HostCosts | None) -> PricedStep:
        """The same step on another host, for which what the device does is not computed again."""
        other = replace(self, host=host)
        vars(other).update({name: getattr(self, name) for name in _OF_THE_DEVICE})
        return other

    @cached_property
    def by_class(self) -> dict[str, list[TimedOp]]:
        """The operations that run on the device, by class, in the order of OP_CLASSES."""
        found: dict[str, list[TimedOp]] = {name: [] for name in OP_CLASSES}
        for op in self.ops:
            if op.work is not None:
                found.setdefault(op.work.op_class, []).append(op)
        return {name: members for name, members in found.items() if members}

    # --- seconds

    @cached_property
    def timeline(self) -> Timeline:
        before = [stage.ops for stage in self._stages_before]
        return Timeline(self.ops, self.profile, self.fabric, before, self.draw)

    @cached_property
    def draw(self) -> Draw:
        """What the step's kernels draw of the part's power."""
        return draw_of(self.ops, self.profile)

    @property
    def least_of_twice(self) -> float:
        """The least seconds of the step of a pipeline with twice as many micro-batches of half the size: a host makes
        each call of a micro-batch twice as often, and none takes less time for fewer samples."""
        return max(stage._host_of_twice for stage in self.stages)

    @property
    def _host_of_twice(self) -> float:
        of_micro_batches: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for op, timed in zip(self.stream.ops, self.ops, strict=True):
            if op.phase != "optimizer" and not op.lane and timed.collective is None:
                of_micro_batches[op.phase, op.name, op.module, op.args].append(timed.host_seconds)
        repeated = (sum(seconds) for seconds in of_micro_batches.values() if not len(seconds) % self.run.accumulate)
        return sum(op.host_seconds for op in self.ops) + sum(repeated)

    @cached_property
    def device_sigma(self) -> float:
        """The standard deviation of the log device seconds, but for what is known within a factor only."""
        return device_log_sigma(self.ops, self.profile, spreads(self.mode))

    @cached_property
    def own_sigmas(self) -> dict[str, float]:
        """By group of classes, the deviation of its log seconds by the errors of single shapes."""
        seconds: dict[str, float] = defaultdict(float)
        for share in self.breakdown:
            seconds[group_of(share.op_class)] += share.seconds
        variances = own_variances(self.ops, self.profile)
        return {group: sqrt(variance) / seconds[group] for group, variance in variances.items() if seconds[group]}

    @cached_property
    def device_moves(self) -> Moves:
        """How far the ends of the device seconds lie below and above."""
        less = sum(pad.more_seconds * pad.chance_left for pad in self.unsure_pads.values())
        more = sum(pad.more_seconds for pad in self.unsure_pads.values())
        return device_moves(self.ops, self.device_sigma, less, more - less)

    @cached_property
    def interval(self) -> Interval:
        """Seconds of the step, with the ends of their 90% interval."""
        return step_interval(self.timeline, self.host_sigma, self.device_moves, spreads(self.mode))

    @cached_property
    def breakdown(self) -> tuple[ClassShare, ...]:
        """Device seconds, FLOPs, bytes and calls of each operation class."""
        return tuple(
            ClassShare(
                name,
                seconds=sum(op.seconds for op in ops),
                flops=sum(op.flops for op in ops),
                bytes=sum(op.bytes for op in ops),
                calls=sum(op.count for op in ops),
            )
            for name, ops in self.by_class.items()
        )

    @property
    def bound(self) -> str:
        """ "host" where enqueuing takes longer than the kernels, with the communication that none hides, else their
        largest part: "matrix", products whose FLOPs take longer than their bytes, "memory" or "communication"."""
        device = self.timeline.device_seconds
        exposed = self.timeline.shares.exposed if self.fabric is not None else 0.0
        if self.timeline.host_seconds > device + exposed and not is_synchronous(self.profile):
            return "host"
        products = [op for op_class, ops in self.by_class.items() if op_class in PRODUCTS for op in ops]
        matrix = bound_seconds(products, self.profile)["matrix"]
        if exposed > max(matrix, device - matrix):
            return "communication"
        return "matrix" if matrix > device / 2 else "memory"

    # --- FLOPs and bytes

    @cached_property
    def flops(self) -> int:
        """The model's FLOPs by MFU's convention: what checkpointing recomputes, and products of the optimizer, as
        Muon's, take time but count as no work. Of several GPUs those of all, once: what tensor or expert parallel does
        not divide, such as all that is in no layer, each of its ranks does. Of a layout of one's own all ranks' FLOPs
        count."""
        layout = self.run.layout
        return (layout.world if layout.is_own else layout.data) * sum(
            timed.flops
            * layout.cp
            * (1 if op.layer is None else layout.tp)
            * (layout.ep if _EXPERTS in op.module else 1)
            for stage in self.stages
            for op, timed in zip(stage.stream.ops, stage.ops, strict=True)
            if timed.flops and not op.is_recomputed and op.phase != "optimizer"
        )

    @cached_property
    def hardware_flops(self) -> int:
        """All FLOPs that the device does, or all devices do, by HFU's convention: with what is recomputed and the
        optimizer's."""
        stages = self.stages
        return self.run.layout.world // len(stages) * sum(timed.flops for stage in stages for timed in stage.ops)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters that are trained and that a token passes, and the FLOPs that 6N makes of them."""
        if self.run.is_parallel:  # a rank holds or multiplies a part of them
            n_params = self.stream.n_params
            return Parameters(n_params, n_params, 6 * n_params * self.run.tokens)
        return count_parameters(self.stream, self.run.tokens)

    @cached_property
    def peak_bytes(self) -> int:
        """Of several GPUs those of the fullest one."""
        return self._peak_of(self._fullest) + self._first_bucket_bytes

    @property
    def _fullest(self) -> Stream:
        """Of a pipeline the stage that holds the most."""
        streams = (stage.stream for stage in self.stages)
        return max(streams, key=self._peak_of)

    def _peak_of(self, stream: Stream) -> int:
        return peak_bytes(stream, self._target)

    @property
    def _target(self) -> Target:
        return target_of(self.profile, self.mode)

    @cached_property
    def _first_bucket_bytes(self) -> int:
        """Of DistributedDataParallel: what is held beyond the steady step's by steps so quick that torch's watchdog has
        not looked in between."""
        buckets = first_bucket_bytes(self._fullest)
        return buckets if buckets and holds_first_buckets(self.timeline.step_seconds()) else 0

    @cached_property
    def memory_parts(self) -> Mapping[str, int]:
        """The peak by part."""
        if self.run.phase != "train":
            return memory_parts(self.stream, self.peak_bytes)
        found = peak_parts(self._fullest, self._target)
        sent = {"communication": found.pop("communication") + self._first_bucket_bytes}
        return {**found, **(sent if self.run.is_parallel else {})}

    @property
    def reserved_bytes(self) -> int:
        return reserved_bytes(self._fullest, self._target) + self._first_bucket_bytes

    @property
    def needed_bytes(self) -> int:
        return needed_bytes(self._fullest, self.run.layout, self._target) + self._first_bucket_bytes

    @property
    def fits(self) -> bool:
        return bool(self.needed_bytes <= self.profile.device["memory_bytes"])

    # --- what the forecast rests on

    @cached_property
    def basis_shares(self) -> dict[str, float]:
        """Shares of the device time by basis: measured, interpolated, extrapolated, and published where published times
        refined the profile. They add up to 1.

        The part of an operation's time taken from the hot curve, because its operands lie in L2, counts by the hot
        curve's basis, the rest by the cold one's.
        """
        seconds = dict.fromkeys(("measured", "interpolated", "extrapolated"), 0.0)
        for op in self.ops:
            for basis, part in op.parts:
                seconds[basis] = seconds.get(basis, 0.0) + part
        total = sum(seconds.values())
        return {basis: value / total if total else 0.0 for basis, value in seconds.items()}

    @property
    def _of_many_graphs(self) -> tuple[str, ...]:
        """Of a step that waits for the host and whose layers break: how far such forecasts were off."""
        entered = len(self.stream.meta.get("graphs", ()))
        if entered < MANY_GRAPHS * int(self.stream.meta.get("accumulate", 1)) or self.bound != "host":
            return ()
        return (MANY_GRAPHS_TOLD.format(entered),)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the forecast does not know well: what the trace took for granted, kernels of unmeasured kinds that take
        a notable share of the time, and Triton's operators on a host where they were not measured."""
        host, run = self.host_costs, self.run
        taken = self.stream.meta.get("notes", ())
        version = version_note(self.stream, str(self.profile.stack.get("torch") or ""))
        taken = (*taken, *filter(None, [version]))
        if self.fabric is not None and self.mode != "eager":
            taken = (*taken, COMPILED_RANKS)
        if run.base_dtype in QUANTISED:
            taken = (*taken, UNTIMED.format(f"call with weights in {run.base_dtype}"))
        if run.finetune == "qlora" or run.optimizer == "adamw8bit":
            taken = (*taken, BITSANDBYTES)
        found = (
            *taken,
            *self._of_many_graphs,
            *_rough_kernels(self.ops),
            *_unmeasured_kernels(self.ops, self.profile),
            *self._of_the_link,
        )
        if host.triton or host is NO_HOST or not {run.matmul, run.attention, run.fused} & {"triton", "best"}:
            return found
        return (
            *found,
            f"host time is low: what Triton's operators cost {host.name} beyond torch's was not measured "
            "(`flopcast bench --suite host` there measures it)",
        )

    @property
    def _of_the_link(self) -> tuple[str, ...]:
        """Says where the link, or what it does among so many GPUs, was not measured."""
        if self.fabric is None:
            return ()
        link, profile = self.fabric.link, self.fabric.link.profile
        if profile is None:
            return (
                f"link {link.name} is projected from its datasheet: `flopcast bench --suite collectives` measures it",
            )
        ranks = {op.collective.ranks for op in self.ops if op.collective is not None and op.seconds}
        others = sorted(ranks - set(profile.measured_gpus()))
        if not others and self.run.hosts == 1:
            return ()
        far = f"{' and '.join(map(str, others))} GPUs" if others else f"{self.run.hosts} hosts"
        among = " and ".join(map(str, profile.measured_gpus()))
        return (f"collectives among {far} are forecast by law: link {link.name} was measured among {among}",)

    def _of_inference(self) -> Mapping[str, Any]:
        """The fields that only a call of inference has."""
        if self.run.phase == "train":
            return {}
        turning = None
        if self.run.phase == "decode":
            turning = turning_batch(self.stream, self.flops, self.run.matrix_dtype, self.profile)
        return {
            "phase": self.run.phase, "context": self.run.context, "turning_batch": turning,
        }  # fmt: skip

    def _of_several(self) -> Mapping[str, Any]:
        """The fields that only a step on several GPUs has."""
        if self.fabric is None:
            return {}
        shares = self.timeline.shares
        return {
            "parallel": str(self.run.layout), "num_gpus": self.run.layout.world, "nodes": self.run.hosts,
            "link": self.fabric.link.name, "communication_seconds": shares.communication,
            "exposed_communication_seconds": shares.exposed, "contention_seconds": shares.contention,
            "bubble_seconds": shares.bubble,
        }  # fmt: skip

    def forecast(self) -> Forecast:
        """Returns the step's forecast. Raises UsageError where the part has no rate for the run's precision."""
        stream, run, profile, timeline = self.stream, self.run, self.profile, self.timeline
        step, low, high = self.interval
        power = timeline.power
        peak = peak_for(profile, run.precision)
        whole = peak * run.layout.world
        return Forecast(
            gpu=profile.gpu,
            profile_basis=profile.basis,
            mode=run.mode,
            n_params=stream.n_params,
            n_params_trained=self.parameters.trained,
            n_params_active=self.parameters.active,
            depth=stream.depth,
            step_seconds=step,
            step_seconds_low=low,
            step_seconds_high=high,
            device_seconds=timeline.device_seconds,
            device_seconds_low=timeline.device_seconds / exp(self.device_moves.down),
            device_seconds_high=timeline.device_seconds * exp(self.device_moves.up),
            host_seconds=timeline.host_seconds,
            host=self.host_costs.name,
            host_machines=self.host_costs.n_machines,
            bound=self.bound,
            tokens_per_second=run.tokens / step,
            flops_counted=self.flops,
            flops_6n=self.parameters.flops_6n,
            mfu=self.flops / step / whole,
            mfu_6n=self.parameters.flops_6n / step / whole,
            flops_hardware=self.hardware_flops,
            hfu=self.hardware_flops / step / whole,
            peak_flops_per_second=peak,
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.reserved_bytes,
            needed_bytes=self.needed_bytes,
            fits=self.fits,
            memory=self.memory_parts,
            kernels=sum(op.launches for op in self.ops),
            breakdown=self.breakdown,
            price=self.price,
            unit=stream.meta.get("unit", "tokens"),
            precision=run.precision,
            optimizer=run.optimizer if run.phase == "train" else "",
            power_watts=power.watts,
            power_seconds=power.seconds,
            clock_share=power.clock_share,
            imbalance=run.imbalance,
            **self._of_inference(),
            **self._of_several(),
            stack={
                "profile": dict(profile.stack),
                "stream": {name: stream.meta.get(name) for name in ("torch", "transformers")},
            },
            basis_shares=self.basis_shares,
            warnings=self.warnings,
        )


@no_garbage_collection()
def forecast(
    config: Mapping[str, Any],
    run: Run,
    profile: Profile,
    *,
    host: HostCosts | None = None,
    price: Price | None = None,
    trace: Trace | None = None,
) -> Forecast:
    """Forecasts one step of `config` on the part that `profile` describes; `trace` makes an op stream that is neither
    shipped nor cached (`stream.library.streams.get_stream`).

    Raises UsageError for what is invalid, not modelled, or not a model.
    """
    run.check()
    stream = get_stream(config, traced_of(run, profile), trace=trace)
    return PricedStep(stream, run, profile, host, price).forecast()


def traced_of(run: Run, profile: Profile) -> Traced:
    """Returns those settings of the run and the device that decide the op stream."""
    return run.traced_on(run.device_of(profile.device))


def target_of(profile: Profile, mode: str) -> Target:
    """Returns what a step's memory depends on besides its operations."""
    return Target(profile.capability, profile.device.get("sm_count"), mode == "compile-graphs")


def peak_for(profile: Profile, precision: str) -> float:
    """Returns the peak dense FLOP/s to which a step of this precision is compared in MFU: of a step function, whose
    precision is the dtype of its products, that dtype's, or fp32's where it has none. Raises UsageError where the part
    has none."""
    dtype = PEAK_OF.get(precision, precision if precision in profile.peaks else "fp32")
    if dtype not in profile.peaks:
        raise UsageError(
            f"precision {precision!r}: {profile.gpu} has no {dtype} rate; valid are precisions of "
            f"{', '.join(sorted(profile.peaks))}"
        )
    return profile.peaks[dtype].value


def _rough_kernels(ops: Sequence[TimedOp]) -> tuple[str, ...]:
    """Says what is known within a factor only, how long it takes and why: its share of the step is as little known."""
    found: dict[str, list[TimedOp]] = defaultdict(list)
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for op in ops:
        if op.work is not None and is_rough(op):
            rule = rule_of(op.work.op_class, op.work.variant)
            words = "" if rule is None else f" ({rule.words})"
            found[words].append(op)
            kinds[words][f"{op.work.op_class} {op.work.variant}"] += op.seconds
    total = sum(op.seconds for op in ops)
    said = []
    for words, members in found.items():
        rest = total - sum(op.seconds for op in members)
        low, high = (sum(op.seconds * exp(way * Z_90 * op.sigma) for op in members) for way in (-1, 1))
        if high / (rest + high) > WORTH_A_WARNING:
            said.append(
                f"{_worst_of(kinds[words])}: {ms(low)} to {ms(high)} ms, {low / (rest + low):.0%} to "
                f"{high / (rest + high):.0%} of device time, known within a factor only{words}"
            )
    return tuple(said)


def _worst_of(kinds: Mapping[str, float]) -> str:
    """Names the three kinds of operation that take the most seconds."""
    return ", ".join(sorted(kinds, key=lambda kind: -kinds[kind])[:3])


def _unmeasured_kernels(ops: Sequence[TimedOp], profile: Profile) -> tuple[str, ...]:
    """Says what share of the time, part by part, rests on no measurement of its kind, or of no size like its own."""
    if profile.basis != "measured":
        return ()
    lent_from = (profile.provenance.get("projected_kinds") or {}).get("from")
    lent = {KernelKind(key.op_class, whole) for key in profile.projected_kinds for whole in wholes_of(key.variant)}
    measured = {KernelKind(key.op_class, whole) for key in profile.own_surfaces for whole in wholes_of(key.variant)}
    how_said = {
        "twin": "in fp16, taken to run as those measured in bf16",
        "unknown": "of no measured kind, costed by their relatives or by bytes",
        "far": "of sizes far from those measured of their kind",
        "lent": f"that were not measured on this GPU, projected from {lent_from}'s",
        "generated": "that inductor generated, by a law of another GPU's",
    }
    found: dict[str, dict[str, float]] = {how: defaultdict(float) for how in how_said}
    for op in ops:
        if op.work is None or "extrapolated" not in (op.basis, op.hot_basis):
            continue
        seconds = sum(part for basis, part in op.parts if basis == "extrapolated")
        if seconds and not is_rough(op):
            kind = KernelKind(op.work.op_class, op.work.variant)
            twin = twin_of(kind.variant)
            how = "lent" if kind in lent else "far" if kind in measured else "unknown"
            if how == "unknown" and twin is not None and replace(kind, variant=twin) in measured:
                how = "twin"
            how = "generated" if kind.op_class == "generated" else how
            found[how][f"{kind.op_class} {kind.variant}"] += seconds
    total = sum(op.seconds for op in ops) or 1.0
    return tuple(
        f"{share:.0%} of device time is in kernels {how_said[how]}: {_worst_of(kinds)}"
        for how, kinds in found.items()
        if (share := sum(kinds.values()) / total) > WORTH_A_WARNING
    )
