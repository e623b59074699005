"""The law of a collective's time in one regime of NCCL's (`choice.py`), and the thread blocks that it holds.

    seconds = latency + carried + sqrt(growth x carried)
    latency = base + hops within a host + hops between hosts, by NCCL's own figures times `Terms.base` and `Terms.hop`
    carried = (bytes through a link in a ring + `copied` x a GPU's own part) / (`share` x what NCCL counts on)

`copied`: the kernel also moves the part that stays on its GPU. `growth`: larger buffers come nearer to the link's rate,
up to 16 GiB and beyond; A100s and B300s reach 0.92 and 0.97 of their last rate at 512 MiB.

Sends, and exchanges of all with all, over NVLink have neither: a GPU's own part has channels of its own, and it is how
many channels NCCL gives to a peer, and how fast those are, that bounds the rate beside the link (`p2p_channels`). Two
GPUs exchange by 16 of 32: at 512 MiB A100s, H200s and B300s by 10, 19 and 21 GB/s in each, where NCCL counts on 20, 37
and 40 for both directions; eight B300s by 28 and by 21 in each.

    seconds = latency + filled + bytes to others / rate
    1 / rate^4 = 1 / (`share` x the link's rate)^4 + 1 / (`channel` x the rate of all channels)^4
    filled = the first chunk of an exchange in each channel / (`channel` x the rate of a channel)

What it ignores: the dtype (sums of bytes take up to a tenth longer than those of halves), registered buffers, what else
is on the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from flopcast.bounds import NonNegative, Positive, Seconds
from flopcast.roofline.gpu.links.choice import (
    P2P_CHUNK,
    US,
    Group,
    Kind,
    Regime,
    bus_rate,
    channel_rate,
    choose,
    hops,
    p2p_channels,
    p2p_rate,
    steps,
    to_peer,
    wire,
)

# The kernels' blocks: NCCL's channels, of which it takes fewer for small sizes. Hopper's 24 are what it logs on hosts
# of 8 GPUs; the others are assumed by kinship until a host's own log (`bench --suite collectives`) says them.
_CHANNELS = {"ampere": 24, "hopper": 24, "blackwell": 32}
_PCIE_CHANNELS, _NVLS_CHANNELS, _P2P_CHANNELS = 4, 16, 32
# Of a network's line rate, what the largest rings reach: 0.94 to 0.96 of aliyun/SimAI's tables, to 64 hosts.
NETWORK_SHARE = 0.94
# How sharply the slower of two bounds decides. From 2 to 8 the errors of machines held out are alike, 7.2 to 7.4% at
# the median from 1 MiB on, 35% at worst.
_SHARPNESS = 4.0
_PER_CHANNEL = {"LL": 512 * 8, "LL128": 640 * 8, "Simple": 512 * 64}  # bytes: threads x NCCL's threshold of each


@dataclass(frozen=True)
class Terms:
    """What was fitted of a regime on one kind of link; 1 of `base`, `hop`, `share` and `channel` is NCCL's own figure.
    `crowded`: the part of the rate that is left to more than two GPUs, whose copies share the host's bridge. `channel`:
    of sends over NVLink, which have neither `copied` nor `growth`."""

    base: Positive
    hop: Positive
    share: Positive
    copied: NonNegative
    growth: Seconds
    crowded: Positive = 1.0
    channel: Positive = 1.0


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
    crowded = terms.crowded if group.per_node > 2 else 1.0
    share = min(terms.share, NETWORK_SHARE) if group.is_network_bound else terms.share
    rate = share * crowded * bus_rate(group, regime)
    moved = wire(asked.kind, group.gpus) * asked.bytes
    begun = latency(asked, regime, terms)
    if is_by_channels(asked, regime):
        by_channels = terms.channel * p2p_rate(asked.kind, asked.bytes, group, regime.protocol)
        slowed: float = (1 + (rate / by_channels) ** _SHARPNESS) ** (1 / _SHARPNESS)
        return begun + _filled(asked, regime, terms) + moved / rate * slowed
    own = 0.0 if asked.kind in ("broadcast", "send_recv") else asked.bytes / group.gpus
    carried = (moved + terms.copied * own) / rate
    return begun + carried + sqrt(terms.growth * carried)


def is_by_channels(asked: Collective, regime: Regime) -> bool:
    """Whether it is known how many channels carry it: sends, and exchanges of all with all, over NVLink."""
    return regime.algorithm == "p2p" and asked.group.nodes == 1 and asked.group.link.kind == "nvlink"


def _filled(asked: Collective, regime: Regime, terms: Terms) -> float:
    """Seconds until an exchange's first chunks are there: nothing of one is received before all of it is sent. LL is
    received line by line, and a GPU that only sends shows no such wait (two and four H200s, from 1 MiB on)."""
    if asked.kind != "all_to_all" or regime.protocol != "Simple":
        return 0.0
    channels = p2p_channels(asked.kind, asked.bytes, asked.group, regime.protocol)
    first = min(P2P_CHUNK, to_peer(asked.kind, asked.bytes, asked.group) / channels)
    return first / (terms.channel * channel_rate(asked.group))


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
