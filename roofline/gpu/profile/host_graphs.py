"""What the host spends on the graphs of a compiled step: entering each, and enqueuing its launches, or its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import NamedTuple

from flopcast.bounds import Deviation, NonNegative, Positive
from flopcast.kernels.shapes import Operand

MODES = ("compile", "compile-graphs")

# What the host spends beside a launch of a graph's code, in launches: on each tensor that a forward is given, a
# parameter, a buffer or an input (dynamo's guards, the wrappers of AOTAutograd and autograd), and on each gradient that
# a backward leaves (autograd's engine). `python -m studies.calls.compiled`, of stacks of layers and tiny models.
GIVEN, GRADIENT = 0.52, 0.81
GIVEN_KINDS = ("parameter", "buffer", "input")  # of the storages of a stream that the graph of a forward is given

# Launches that one of a graph of inference costs, its share of tensors and heavier calls included: the same study, of
# forwards without gradients of tiny Qwen3s and GPT-2s. Prefills and decodes with a cache have 1.36 at the mean of seven
# processes on two other machines, 1.0 to 1.5 by process.
OF_INFERENCE = 1.34

# Launches that a call of these costs the host beyond one: the first where `is_dense_nchw`, else the second; the same
# study. Attention was measured of cuDNN, which torch picks on an H200.
_ATTENTION = [f"aten._scaled_dot_product_{kind}_attention" for kind in ("cudnn", "flash", "efficient")]
HEAVIER_CALLS = {
    "aten.convolution": (1.8, 0.2), "aten.convolution_backward": (2.7, 2.7), **dict.fromkeys(_ATTENTION, (4.4, 4.4)),
    **{f"{name}_backward": (3.6, 3.6) for name in _ATTENTION},
}  # fmt: skip


class Entry(NamedTuple):
    """Entering a graph, in launches: the geometric mean of processes, and the deviation of its logarithm."""

    launches: Positive
    sigma: Deviation


# Launches that entering the graph of a Qwen3's forward, and of its backward, costs the host: the same study, of seven
# processes on three machines whose device was idle. Two depths of a tiny model hardly tell entering from launching:
# by their fits alone entering a forward cost 27 to 149 launches in nineteen processes that ran steps. Six more on a
# fourth machine have 51 and 53.
ENTERING = (Entry(48.6, 0.28), Entry(38.0, 0.35))

# Entering a graph of inference, over that of a forward that a backward follows: the same study.
ENTERING_INFERENCE = 0.73

# Deviation of the log seconds of a phase of a tiny model about its costs: of the study's Qwen3s, to whose four phases
# three costs are fitted.
PHASE_NOISE = 0.09


def is_dense_nchw(images: Operand, weights: Operand) -> bool:
    """Whether a convolution of these takes each channel of images in the layout NCHW to each of its results."""
    return images.is_contiguous and (len(weights.shape) < 2 or weights.shape[1] > 1)


@dataclass(frozen=True)
class GraphCosts:
    """Host seconds in one mode. `launch`: for each launch of a graph's code, a generated kernel or a call of a library,
    of which some cost several (HEAVIER_CALLS), as tensors and gradients do (GIVEN, GRADIENT); with CUDA graphs for each
    node of the graph that is replayed, whatever it is. `forward`: once for each graph that a forward enters
    (dynamo's guards and frame, AOTAutograd's wrapper), `backward` for each that a backward does (autograd's engine).

    `sigma`: standard deviation of the log of another process's, or machine's, costs about them; steps of another kind
    differ from them besides (`step.uncertainty.Spreads.host_same_run`). `source`: what they were measured on.
    """

    launch: NonNegative
    forward: NonNegative
    backward: NonNegative
    sigma: Deviation
    source: str = ""

    def scaled(self, factor: float, sigma: float = 0.0) -> GraphCosts:
        """These costs of a host that takes `factor` times as long, which is known with the deviation `sigma`."""
        return replace(
            self, launch=self.launch * factor, forward=self.forward * factor, backward=self.backward * factor,
            sigma=hypot(self.sigma, sigma),
        )  # fmt: skip

    def entry(self, phase: str) -> float:
        """Host seconds to enter a graph in this phase of a training step."""
        return self.forward if phase == "forward" else self.backward

    def seconds(self, calls: Calls) -> float:
        """Host seconds of a phase, or of a whole step."""
        return self.launch * calls.launches + self.forward * calls.forward + self.backward * calls.backward


class Calls(NamedTuple):
    """How often a phase enters graphs, and the launches in them, with what else costs as much as launches do."""

    launches: float
    forward: float
    backward: float


def fit_graph_costs(
    measured: Sequence[tuple[Calls, float]], source: str = "", entering: tuple[Entry, Entry] | None = None
) -> GraphCosts:
    """Fits the costs to phases of measured steps, (calls, host seconds): the sum of squared relative errors is least.
    With `entering`, forward and backward, what is known of it counts as two phases more, by its deviation over
    PHASE_NOISE. Raises ValueError without phases."""
    import numpy as np
    from scipy.optimize import nnls

    if not measured:
        raise ValueError("no phases to fit host costs of graphs to")
    shares = [np.array(calls, float) / seconds for calls, seconds in measured]
    wanted = [1.0] * len(measured)
    if entering is not None:
        forward, backward = entering
        counted = sum(c.launches + forward.launches * c.forward + backward.launches * c.backward for c, _ in measured)
        scale = sum(seconds for _, seconds in measured) / counted
        for known, entry in ((forward, (0.0, 1.0, 0.0)), (backward, (0.0, 0.0, 1.0))):
            off = np.array(entry) - np.array([known.launches, 0.0, 0.0])  # of costs that are as known it makes zero
            shares.append(off / (known.launches * scale) * (PHASE_NOISE / known.sigma))
            wanted.append(0.0)
    found, _ = nnls(np.array(shares), np.array(wanted))
    launch, forward_entry, backward_entry = map(float, found)
    return GraphCosts(launch, forward_entry, backward_entry, 0.0, source)


def mean_graph_costs(hosts: Sequence[GraphCosts], sigma: float) -> GraphCosts:
    """The mean of several processes' or machines' costs; `sigma`: how far one more of them lies from it."""
    n = len(hosts)
    return GraphCosts(
        launch=sum(one.launch for one in hosts) / n, forward=sum(one.forward for one in hosts) / n,
        backward=sum(one.backward for one in hosts) / n, sigma=sigma, source=hosts[0].source,
    )  # fmt: skip
