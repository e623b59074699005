"""The law of a collective's time in one regime of NCCL's (`choice.py`), and the thread blocks that it holds.

    seconds = latency + carried + sqrt(growth x carried)
    latency = base + hops within a host + hops between hosts, by NCCL's own figures times `Terms.base` and `Terms.hop`
    carried = (bytes through a link in a ring + `copied` x a GPU's own part) / (`share` x what NCCL counts on)

`copied`: the kernel also moves the part that stays on its GPU. `growth`: larger buffers come nearer to the link's rate,
up to 16 GiB and beyond; A100s and B300s reach 0.92 and 0.97 of their last rate at 512 MiB. What it ignores: the dtype
(sums of bytes take up to a tenth longer than those of halves), registered buffers, what else is on the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from flopcast.bounds import NonNegative, Positive, Seconds
from flopcast.roofline.gpu.links.choice import US, Group, Kind, Regime, bus_rate, choose, hops, steps, wire

# The kernels' blocks: NCCL's channels, of which it takes fewer for small sizes. Hopper's 24 are what it logs on hosts
# of 8 GPUs; the others are assumed by kinship until a host's own log (`bench --suite collectives`) says them.
_CHANNELS = {"ampere": 24, "hopper": 24, "blackwell": 32}
_PCIE_CHANNELS, _NVLS_CHANNELS, _P2P_CHANNELS = 4, 16, 32
# Of a network's line rate, what the largest rings reach: 0.94 to 0.96 of aliyun/SimAI's tables, to 64 hosts.
NETWORK_SHARE = 0.94
_PER_CHANNEL = {"LL": 512 * 8, "LL128": 640 * 8, "Simple": 512 * 64}  # bytes: threads x NCCL's threshold of each


@dataclass(frozen=True)
class Terms:
    """What was fitted of a regime on one kind of link; 1 of `base`, `hop` and `share` is NCCL's own figure.
    `crowded`: the part of the rate that is left to more than two GPUs, whose copies share the host's bridge."""

    base: Positive
    hop: Positive
    share: Positive
    copied: NonNegative
    growth: Seconds
    crowded: Positive = 1.0


@dataclass(frozen=True)
class Collective:
    """A collective that is asked for: its kind, the whole bytes as nccl-tests counts them, and where it runs."""

    kind: Kind
    bytes: float
    group: Group

    @property
    def regime(self) -> Regime:
        """What NCCL takes for it."""
        return choose(self.kind, self.bytes, self.group)


def key_of(asked: Collective, regime: Regime) -> str:
    """The name of a regime's terms: "nvlink ring/LL". A single send, in one direction, has its own."""
    return f"{asked.group.link.kind} {'send' if asked.kind == 'send_recv' else regime.algorithm}/{regime.protocol}"


def latency(asked: Collective, regime: Regime, terms: Terms) -> float:
    """Seconds of the smallest size."""
    base, inside, between = hops(asked.group, regime)
    in_host, in_network = steps(asked.kind, asked.group, regime.algorithm)
    return US * (terms.base * base + terms.hop * inside * in_host + between * in_network)


def seconds(asked: Collective, regime: Regime, terms: Terms) -> float:
    """The time on the GPUs, launch excluded."""
    group = asked.group
    own = 0.0 if asked.kind in ("broadcast", "send_recv") else asked.bytes / group.gpus
    crowded = terms.crowded if group.per_node > 2 else 1.0
    moved = wire(asked.kind, group.gpus) * asked.bytes + terms.copied * own
    share = min(terms.share, NETWORK_SHARE) if group.is_network_bound else terms.share
    carried = moved / (share * crowded * bus_rate(group, regime))
    return latency(asked, regime, terms) + carried + sqrt(terms.growth * carried)


def line_seconds(asked: Collective, regime: Regime) -> float:
    """What the bytes take at the line rate of the slower link: no time is below it. NVSwitch, where it adds up, is
    sent each byte once."""
    group = asked.group
    rate = group.link.bytes_per_second
    if group.network is not None:
        outside = group.network.bytes_per_second * group.per_node
        rate = outside if group.per_node == 1 else min(rate, outside)
    moved = 1.0 if regime.algorithm == "nvls" else wire(asked.kind, group.gpus)
    return moved * asked.bytes / rate


def blocks(asked: Collective, regime: Regime | None = None) -> int:
    """Thread blocks, and so multiprocessors, that the kernel holds: NCCL's channels."""
    algorithm, protocol = regime or asked.regime
    group = asked.group
    most = _PCIE_CHANNELS if group.link.kind == "pcie" else _CHANNELS[group.link.arch]
    if algorithm == "nvls":
        return _NVLS_CHANNELS
    if algorithm == "p2p":
        return most if group.link.kind == "pcie" else _P2P_CHANNELS
    per_channel = _PER_CHANNEL[protocol] * (group.gpus if (algorithm, protocol) == ("ring", "LL") else 1)
    return max(1, min(most, int(asked.bytes / per_channel)))
