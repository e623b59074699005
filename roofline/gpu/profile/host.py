"""Host profiles: what the host spends on a step, in a small file of its own, apart from any GPU's.

A step needs both; `--host` combines one machine's host with another's GPU. Files are JSON, {"schema", "kind": "host",
...} with the fields of `HostCosts`. One ships, in `data/hosts`: the mean of the machines that were measured, with their
spread. It feeds every GPU unless the user names or measures another (`default_host`), and

    python -m studies.shipped.hosts

makes it from the measurements in `reports`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from flopcast import files
from flopcast.bounds import Count, Deviation, NonNegative
from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.json_files import read_json
from flopcast.roofline.base.numbers import Z_90, Basis
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.profile.host_graphs import GraphCosts, mean_graph_costs
from flopcast.roofline.stream.ops.op_stream import Op, packet

SCHEMA = 1
KIND = "host"
HOSTS = DATA / "hosts"
DEFAULT = "intel-xeon-family-6-model-207"
PHASES = ("forward", "backward", "optimizer")
# What an optimizer's call of an operator on single tensors costs over a call of the forward, with the Python around it:
# 0.99 and 0.89, Adafactor's two forms on tiny models (`python -m studies.calls.optimizers`).
CALL_OVER_FORWARD = 0.94
# What a tensor in the lists of these operators costs over one in those of AdamW's foreach calls, by which `per_tensor`
# is measured: flopcast's optimizer makes a table of addresses, and each norm that clipping stacks was allocated, asked
# for its device and is freed. Tiny models of two depths beside torch's fused AdamW in the same run (`python -m
# studies.calls.optimizers --adamw`): 1.6 and, with clipping, 1.8 on an H200's host; 3.1 and 7.4 on two.
LIST_TENSOR_WEIGHT = {
    "flopcast.adamw_": 1.7, "flopcast.adamw_clipped_": 1.7, "flopcast.gradient_norm": 1.7, "aten.stack": 4.8,
}  # fmt: skip
# Ratio of a view's host cost to that of an op that launches a kernel: both pass the dispatcher and autograd, but a view
# neither allocates nor launches.
VIEW_WEIGHT = 0.4
# How far processes of one machine lie apart (standard deviation of log seconds; 17 processes beyond the first of five
# machines), and as how many processes' evidence that counts for another machine: single ones had 0.02 to 0.27.
PROCESS_SPREAD, PROCESS_DEGREES = 0.16, 5


class Layer(TypedDict, total=False):
    """Seconds per layer of the calibrated model: the median, its fixed part, the range, each machine's or process's."""

    seconds: Required[NonNegative]
    fixed: NonNegative
    low: NonNegative
    high: NonNegative
    machines: Sequence[NonNegative]
    processes: Sequence[NonNegative]


class Layers(TypedDict, total=False):
    """What `HostCosts.layers` holds."""

    model: str
    mode: str
    depths: Sequence[Count]
    forward: Layer
    backward: Layer
    optimizer: Layer
    step: Layer


@dataclass(frozen=True)
class HostCosts:
    """Seconds of host time per op, by phase.

    forward, backward: {"launch", "view", "fixed"}; optimizer: {"launch", "per_tensor", "host_op", "fixed"}, of calls
    that take lists of tensors, as the usual ones do; one on single tensors costs what `CALL_OVER_FORWARD` says.
    `fixed` is spent once per phase, in forward and backward only by models whose forward waits for the device
    (`step.device_work`); `step_fixed` once per step besides. `sigma`: standard deviation of log seconds from one
    process to the next, or, of several machines' mean, from one machine to the next.

    `triton`: what a call of an operator with Triton's kernels costs beyond an ATen call beside it, by operator
    ("rms_norm", "swiglu_backward", "mm", "attention"; `microbench.hosts`). Empty where it was not measured, as
    in files of older versions: such a call then counts as an ATen call, which is too little.

    `layers`: the cost per layer of the calibrated model, by phase (`fit.host.layer_costs`), for readers; no
    forecast uses it. `stack`, `date`, `cores`, `device`: what it was measured with.
    """

    name: str
    forward: dict[str, NonNegative]
    backward: dict[str, NonNegative]
    optimizer: dict[str, NonNegative]
    step_fixed: NonNegative
    sigma: Deviation
    basis: Basis
    cpu: str = ""
    cores: Count | None = None
    device: str = ""
    date: str = ""
    stack: dict[str, Any] = field(default_factory=dict)
    layers: Annotated[dict[str, Any], Layers] = field(default_factory=dict)
    triton: dict[str, NonNegative] = field(default_factory=dict)
    compiled: dict[str, GraphCosts] = field(default_factory=dict)

    def seconds(self, phase: str, kind: str, *, launches: int = 1, tensors: float = 0) -> float:
        """Host seconds of one op. `kind` as in `op_stream.Op`; `launches` kernels it launches, `tensors` it
        takes in lists (`listed_tensors`; foreach and fused optimizers check each)."""
        costs: dict[str, float] = getattr(self, phase)
        if "per_tensor" in costs and not tensors and kind != "host":  # a processor's own costs are of single tensors
            call = CALL_OVER_FORWARD * self.forward.get("launch", 0.0)
            return VIEW_WEIGHT * call if kind == "view" else call
        if kind == "view":
            return costs.get("view", 0.0)
        if kind == "host":
            return costs.get("host_op", costs.get("view", 0.0)) + costs.get("per_tensor", 0.0) * tensors
        return costs.get("launch", 0.0) * max(launches, 1) + costs.get("per_tensor", 0.0) * tensors

    def bare_call(self, views: int = 0) -> float:
        """Host seconds of a call in a loop of Python, with so many views of its operands, outside of modules, autocast
        and autograd: the scalar `launch`, which optimizers' launches cost too, was measured so."""
        return self.optimizer.get("launch", 0.0) * (1 + VIEW_WEIGHT * views)

    def graph_costs(self, mode: str) -> GraphCosts:
        """What the graphs of a compiled step cost. Where it was not measured, the shipped host's costs, times how much
        longer this host takes for an eager call."""
        if mode in self.compiled:
            return self.compiled[mode]
        shipped = default_host()
        pairs = [(getattr(self, phase).get("launch", 0.0), getattr(shipped, phase)["launch"]) for phase in PHASES[:2]]
        return shipped.compiled[mode].scaled(sqrt(prod(own / other for own, other in pairs)), self.sigma)

    def scaled(self, factor: float) -> HostCosts:
        """These costs with every time multiplied by `factor`."""

        def times(costs: Mapping[str, float]) -> dict[str, float]:
            return {name: seconds * factor for name, seconds in costs.items()}

        return replace(
            self, step_fixed=self.step_fixed * factor, forward=times(self.forward), backward=times(self.backward),
            optimizer=times(self.optimizer), triton=times(self.triton),
            compiled={mode: costs.scaled(factor) for mode, costs in self.compiled.items()},
        )  # fmt: skip

    @property
    def n_machines(self) -> int:
        """The number of machines whose mean these costs are."""
        return len(self.layers.get("step", {}).get("machines", ())) or 1

    # --- files

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": KIND, **asdict(self)}

    def save(self, path: Path) -> None:
        """Writes the host whole or not at all. Raises UsageError when it cannot be written, RunError without room."""
        with files.write_errors(path):
            files.write(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> HostCosts:
        """Raises DataError when the file is missing, malformed, of a newer schema, or no host."""
        host = host_in(path)
        if host is None:
            raise DataError(f'{path} is no host: an object with "kind": "{KIND}" is expected; `flopcast fit` makes it')
        return host


def listed_tensors(op: Op) -> float:
    """How many tensors an operation takes in lists, each by its `LIST_TENSOR_WEIGHT`; 0 where it takes none."""
    return len(op.inputs) * LIST_TENSOR_WEIGHT.get(packet(op.name), 1.0) if '"ts"' in op.args else 0.0


# `--host none`: the device alone.
NO_HOST = HostCosts(name="none", forward={}, backward={}, optimizer={}, step_fixed=0.0, sigma=0.0, basis="measured")


def default_host() -> HostCosts:
    """The shipped host: what feeds a GPU when nothing is known of the user's machine."""
    return HostCosts.load(HOSTS / f"{DEFAULT}.json")


def host_in(path: Path) -> HostCosts | None:
    """The host of a host file; None for a file of another kind (a GPU's profile). Raises DataError as `load`."""
    record = read_json(path, "a host", hint="`flopcast bench --suite host` and `flopcast fit` make a host")
    if not isinstance(record, dict) or record.get("kind") != KIND:
        return None
    return decode(HostCosts, record, str(path), "a host", schema=SCHEMA)


def host_files(folder: Path = HOSTS) -> dict[str, Path]:
    """The hosts kept in a folder, name -> file."""
    if not folder.is_dir():
        return {}
    return {path.stem: path for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")}


def combine(hosts: Sequence[HostCosts], of: str = "processes") -> HostCosts:
    """One host for several processes of a machine, or (`of` "machines") for several machines of one processor.

    Each cost is the mean. `sigma` is that of one more process, the one that will train, by the spread of these in
    seconds per layer (`sigma_of_another`), and no less than the spread within one; or that of a process of one more
    machine. Raises ValueError for hosts of different processors, or none."""
    import numpy as np

    if len({host.cpu for host in hosts}) != 1:
        raise ValueError(f"hosts of one processor are combined, not of {sorted({host.cpu for host in hosts})}")
    first, *others = hosts
    if not others:
        least = 0.0 if of == "machines" else sigma_of_another((), PROCESS_SPREAD, PROCESS_DEGREES)
        compiled = {mode: replace(one, sigma=max(one.sigma, least)) for mode, one in first.compiled.items()}
        return replace(first, sigma=max(first.sigma, least), compiled=compiled)

    def mean(values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else float(np.mean(values))

    costs: dict[str, Any] = {
        phase: {kind: mean([getattr(h, phase).get(kind, 0.0) for h in hosts]) for kind in getattr(first, phase)}
        for phase in PHASES
    }
    merged: dict[str, Any] = {key: first.layers[key] for key in ("model", "mode", "depths") if key in first.layers}
    for phase in (*PHASES, "step"):
        own = [host.layers[phase] for host in hosts if phase in host.layers]
        if own:
            merged[phase] = {
                "seconds": mean([one["seconds"] for one in own]),
                "fixed": mean([one["fixed"] for one in own]),
                "low": min(one["low"] for one in own),
                "high": max(one["high"] for one in own),
                of: [one["seconds"] for one in own],
            }
    operators = {name for host in hosts for name in host.triton}
    triton = {name: mean([host.triton[name] for host in hosts if name in host.triton]) for name in sorted(operators)}
    paces = merged.get("step", {}).get(of, ())
    within = float(np.median([host.sigma for host in hosts]))
    between = sigma_of_another(paces, *(() if of == "machines" else (PROCESS_SPREAD, PROCESS_DEGREES)))
    sigma = float(np.hypot(within, between)) if of == "machines" else max(within, between)
    compiled = {
        mode: mean_graph_costs([host.compiled[mode] for host in hosts if mode in host.compiled], between)
        for mode in sorted({mode for host in hosts for mode in host.compiled})
    }
    return replace(
        first, **costs, triton=triton, compiled=compiled, step_fixed=mean([host.step_fixed for host in hosts]),
        sigma=sigma, date=max(host.date for host in hosts), layers=merged,
    )  # fmt: skip


def sigma_of_another(seconds: Sequence[float], known: float = 0.0, degrees: int = 0) -> float:
    """The standard deviation of the log of one more draw about the mean of these: 90% of such draws lie within Z_90 of
    it (Student's prediction interval). `known`: the spread that other draws had, which counts as `degrees` of freedom.
    0 where nothing is known of it."""
    import numpy as np
    from scipy.stats import t

    logs = np.log([value for value in seconds if value > 0])
    n = max(len(logs), 1)
    freedom = degrees + n - 1
    if freedom < 1:
        return 0.0
    squares = degrees * known**2 + (logs.var() * n if n > 1 else 0.0)
    return float(sqrt(squares / freedom * (1 + 1 / n)) * t.ppf(0.95, freedom) / Z_90)


def machines_of(host: HostCosts) -> str:
    """A text: how many machines a host is the mean of, and the range of a step's ms per layer among them."""
    each = [seconds * 1e3 for seconds in host.layers.get("step", {}).get("machines", ())]
    return f"{len(each)}: {min(each):.1f} to {max(each):.1f}" if each else "1"
