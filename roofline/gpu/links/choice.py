"""Which algorithm and protocol NCCL picks for a collective: its own model of their times, whose smallest it takes.

Follows `ncclTopoTuneModel` and `ncclTopoGetAlgoTime` of NCCL's src/graph/tuning.cc (2.27 to 2.30, BSD-3-Clause), which
has the constants below. Its times are no forecast: they are up to a factor of two low. But where they cross, the
measured times jump (two A100s' all-gather goes over to Simple from 1 to 2 MiB, and from 20 to 38 µs), at every size of
the published tables of A100s and B300s. Sends, and exchanges of all with all, which are sends, follow `addP2pToPlan` of
src/enqueue.cc. Left out: CollNet, PAT and tuner plugins. Sizes are whole, as nccl-tests counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from flopcast.errors import UsageError
from flopcast.roofline.gpu.links.catalogue import Link

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Algorithm = Literal["ring", "tree", "nvls", "p2p"]
Protocol = Literal["LL", "LL128", "Simple"]
NCCL = (2, 28)  # the version that torch 2.11 comes with

US, GB = 1e-6, 1e9
_BASE = {"tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4}, "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}}
_HOP = {  # µs per step, by what the step goes over
    ("nvlink", "tree"): {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
    ("nvlink", "ring"): {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
    ("pcie", "tree"): {"LL": 1.0, "LL128": 1.9, "Simple": 4.0},
    ("pcie", "ring"): {"LL": 1.0, "LL128": 2.5, "Simple": 5.7},
    ("network", "tree"): {"LL": 5.0, "LL128": 8.5, "Simple": 14.0},
    ("network", "ring"): {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
}
_POST = 1.0  # µs, of a network step on an Intel host
_NVLS_US = 25.0
_P2P_BASE_US, _P2P_HOP_US = 10.0, 1.0  # where the fit of sends begins
# GB/s that LL reaches at most: in one host by the GPU, in two and in more by the processor (AMD's, the higher)
_LL_MOST = {"ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
_LL_MOST_OF_NODES = {2: 22.5, 3: 19.0}
_CHANNELS = {"ampere": 12, "hopper": 16, "blackwell": 16}  # of the graph that NCCL finds on NVSwitch
_LL128_RING = {"ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}  # GB/s per channel
_LL128_RING_BLACKWELL = (((2, 29), 73.4), ((2, 29, 3), 34.5))  # below these versions
_LL128_TREE = {"ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0)}
_TREE = {"ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0)}
_NVLS = {"hopper": 0.85, "blackwell": 0.74}
# GPUs from which NVLS is taken (stas00/ml-engineering, network/README.md: an H200 host from 5, a B200 host from 6)
_NVLS_FROM = {"hopper": 5, "blackwell": 6}
# what NCCL takes off a tree's rate, by powers of two from 64 B
_TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    "Simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
}  # fmt: skip
_RING_PLATEAU = 1.4  # of a Simple ring's latency between hosts
# Where LL is modelled to be so little slower than the fastest, NCCL takes LL: in all three such sizes of two H200s.
TIE = 0.995
# Channels of sends in a host, which over NVLink are twice the links of an A100, up to a power of two; those that one
# peer may have; and those to a peer on another host.
_P2P_CHANNELS, _P2P_CHANNELS_OF_PEER = {"nvlink": 32, "pcie": 4}, {"nvlink": 32, "pcie": 2}
_P2P_CHANNELS_OF_NETWORK = 2
# Sends are by LL up to so many bytes (NCCL_P2P_LL_THRESHOLD) in each channel that a peer may have, since 2.29 in each
# that it has: up to 512 KiB to a peer over NVLink, and since 2.29 up to 16.
_P2P_LL_BYTES, _P2P_LL_SINCE = 16 * 1024, (2, 29)
P2P_CHUNK = 512 * 1024  # bytes that a channel sends at once by Simple over NVLink (NCCL_P2P_NVL_CHUNKSIZE)
# Bytes to a peer for which it has another channel, up to its least number, and from which on it has more than that.
_P2P_PART = {"LL": 8 * 1024, "Simple": P2P_CHUNK // 8}
_P2P_FULL = {"LL": 2 * 1024**2, "Simple": 32 * P2P_CHUNK}


class Regime(NamedTuple):
    """An algorithm and a protocol."""

    algorithm: Algorithm
    protocol: Protocol

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.protocol}"

    @classmethod
    def parse(cls, text: str) -> Regime:
        """The regime that `str` wrote. Raises ValueError for another text."""
        algorithm, _, protocol = text.partition("/")
        if algorithm not in get_args(Algorithm) or protocol not in get_args(Protocol):
            raise ValueError(f"{text!r} is no algorithm and protocol")
        return cls(algorithm, protocol)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Group:
    """The GPUs that take part, evenly on `nodes` hosts, and what joins them. `nvls`: whether NVSwitch may add up
    (NVLink SHARP). Raises UsageError for numbers that do not go together."""

    gpus: int
    link: Link
    nodes: int = 1
    network: Link | None = None
    nvls: bool = True
    nccl: tuple[int, ...] = NCCL

    def __post_init__(self) -> None:
        if self.gpus < 2:
            raise UsageError(f"{self.gpus} GPUs: a collective takes 2 or more")
        if not 1 <= self.nodes <= self.gpus or self.gpus % self.nodes:
            raise UsageError(f"{self.gpus} GPUs on {self.nodes} hosts: valid is a number of hosts that divides them")
        if (self.network is None) is not (self.nodes == 1):
            raise UsageError(f"{self.nodes} hosts: a network joins several hosts, and only those")

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def is_network_bound(self) -> bool:
        """Whether a ring is slower between the hosts than in them: it leaves a host through all of its adapters."""
        return self.network is not None and (self.per_node == 1 or self._outside < self.link.carried_bytes_per_second)

    @property
    def carried(self) -> float:
        """bytes/s of a ring's slower link, of what data get."""
        return self._outside if self.is_network_bound else self.link.carried_bytes_per_second

    @property
    def _outside(self) -> float:
        return 0.0 if self.network is None else self.network.carried_bytes_per_second * self.per_node


def steps(kind: Kind, group: Group, algorithm: Algorithm = "ring") -> tuple[int, int]:
    """How often data go from a GPU to the next within a host, and between hosts, from the first byte to the last."""
    n, nodes = group.gpus, group.nodes
    if algorithm == "nvls":
        return 1, 0
    if kind == "broadcast":  # chunks follow each other: NCCL counts one step, however many GPUs
        return (1, 0) if nodes == 1 else (0, 1)
    if algorithm == "p2p":
        turns = n - 1 if kind == "all_to_all" else 1
        return (turns, 0) if nodes == 1 else (0, 1)
    if algorithm == "tree":
        return 2 * (group.per_node - 1), 2 * (nodes.bit_length() - 1)
    turns = 2 if kind == "all_reduce" else 1
    between = 0 if nodes == 1 else turns * (nodes - 1)
    return turns * (n - 1) - between, between


def wire(kind: Kind, gpus: int) -> float:
    """Bytes that pass through a GPU's link in a ring, over the whole bytes: nccl-tests' bus bandwidth by the rate at
    which the whole is done."""
    if kind == "all_reduce":
        return 2 * (gpus - 1) / gpus
    return 1.0 if kind in ("broadcast", "send_recv") else (gpus - 1) / gpus


def choose(kind: Kind, whole: float, group: Group) -> Regime:
    """What NCCL takes for a collective of so many bytes."""
    if kind in ("all_to_all", "send_recv"):
        return Regime("p2p", "LL" if to_peer(kind, whole, group) <= _p2p_ll_bytes(group) else "Simple")
    regimes = [Regime("ring", protocol) for protocol in get_args(Protocol)]
    if kind == "all_reduce":
        regimes += [Regime("tree", protocol) for protocol in get_args(Protocol)]
        if has_nvls(group):
            regimes.append(Regime("nvls", "Simple"))
    may_ll128 = group.link.kind == "nvlink"
    return min(
        (regime for regime in regimes if may_ll128 or regime.protocol != "LL128"),
        key=lambda regime: modelled_seconds(kind, whole, group, regime) * (TIE if regime == ("ring", "LL") else 1.0),
    )


def to_peer(kind: Kind, whole: float, group: Group) -> float:
    """Bytes of a send, or of an exchange of all with all, that go to one peer."""
    return whole / group.gpus if kind == "all_to_all" else whole


def _least_channels(group: Group) -> int:
    """Channels that each peer of a host has at least: as many as all of them, and a GPU's own part, can have."""
    channels = _P2P_CHANNELS_OF_PEER[group.link.kind]
    while channels > 1 and channels * group.gpus > _P2P_CHANNELS[group.link.kind]:
        channels //= 2
    return channels


def _p2p_ll_bytes(group: Group) -> int:
    """Bytes to a peer up to which NCCL sends them by LL."""
    kind = group.link.kind
    if group.nccl < _P2P_LL_SINCE:
        channels = _P2P_CHANNELS_OF_PEER[kind] if group.nodes == 1 else _P2P_CHANNELS_OF_NETWORK
    else:  # a peer has one for each 64 KiB over NVLink and a network, for each 16 over PCI Express
        channels = _least_channels(group) if kind == "pcie" and group.nodes == 1 else 1
    return channels * _P2P_LL_BYTES


def p2p_channels(kind: Kind, whole: float, group: Group, protocol: Protocol) -> float:
    """Channels of NCCL's that the bytes to one peer of a host are spread over, over NVLink: at powers of two those that
    NCCL takes, and between them never so many that more bytes would take less time."""
    size, least = to_peer(kind, whole, group), _least_channels(group)
    spread = min(least, max(1.0, size / _P2P_PART[protocol]))
    return min(_P2P_CHANNELS["nvlink"], max(spread, size / _P2P_FULL[protocol]))


def p2p_rate(kind: Kind, whole: float, group: Group, protocol: Protocol) -> float:
    """bytes/s of all channels over NVLink that a GPU sends by, each at what NCCL counts on of a ring's channel. In an
    exchange half of a channel's threads send and half receive; LL moves 8 bytes with 8 of flags where Simple moves 16,
    and not several at once."""
    channels = p2p_channels(kind, whole, group, protocol)
    if kind == "all_to_all":
        channels = min(_P2P_CHANNELS["nvlink"], channels * (group.gpus - 1)) / 2
    return channels * (0.25 if protocol == "LL" else 1.0) * channel_rate(group)


def channel_rate(group: Group) -> float:
    """bytes/s of one of NCCL's channels over NVLink."""
    return _LL128_RING[group.link.arch] * GB


def has_nvls(group: Group) -> bool:
    """Whether NVSwitch adds up an all-reduce of this group: within one host, from some number of GPUs on."""
    least = _NVLS_FROM.get(group.link.arch) if group.link.kind == "nvlink" else None
    return group.nvls and group.nodes == 1 and least is not None and group.gpus >= least


def modelled_seconds(kind: Kind, whole: float, group: Group, regime: Regime) -> float:
    """The time by which NCCL decides."""
    rate = bus_rate(group, regime) * (0.5 if regime.algorithm == "tree" else 1 / wire(kind, group.gpus))
    latency = _latency(kind, group, regime)
    if regime.algorithm == "tree":
        place = int(whole / 64).bit_length() - 1
        correction = _TREE_CORRECTION[regime.protocol]
        rate *= correction[place] if 0 <= place < len(correction) else 1.0
    if regime == ("ring", "Simple") and group.nodes > 1 and kind == "all_reduce":
        latency *= _RING_PLATEAU
    return latency * US + whole / rate


def _latency(kind: Kind, group: Group, regime: Regime) -> float:
    """NCCL's latency, in µs."""
    base, inside, between = hops(group, regime)
    in_host, in_network = steps(kind, group, regime.algorithm)
    return base + in_host * inside + in_network * between


def hops(group: Group, regime: Regime) -> tuple[float, float, float]:
    """NCCL's µs of a launch, of a step within a host and of one between hosts."""
    algorithm, protocol = regime
    if algorithm == "nvls":
        return 0.0, _NVLS_US, 0.0
    if algorithm == "p2p":  # NCCL has no figures, since it has no choice
        return _P2P_BASE_US, _P2P_HOP_US, _HOP["network", "tree"][protocol]
    inside = _HOP[group.link.kind, algorithm][protocol]
    # with a GPU per host the network's latency is not hidden: NCCL takes the tree's
    between = _HOP["network", "tree" if group.per_node == 1 else algorithm][protocol]
    if algorithm == "ring" and group.nodes > 1:
        inside = max(inside, _POST * (3 if protocol == "Simple" else 1))
    return _BASE[algorithm][protocol], inside, between


def bus_rate(group: Group, regime: Regime) -> float:
    """bytes/s that NCCL thinks a regime has on each link."""
    algorithm, protocol = regime
    rate, arch = group.carried / GB, group.link.arch
    if algorithm == "p2p":  # each GPU by its own adapter
        own = (group.network or group.link).carried_bytes_per_second
        return own * (0.5 if protocol == "LL" else 1.0)
    channels = _CHANNELS.get(arch, 8)
    size = min(group.nodes, 3) - 1
    if algorithm == "nvls":
        return rate * _NVLS[arch] * (channels - 1) / channels * 2 * GB
    most_ll = _LL_MOST[arch] if group.nodes == 1 else _LL_MOST_OF_NODES[min(group.nodes, 3)]
    if algorithm == "ring":
        ring = {"LL": min(most_ll, rate / 2), "LL128": min(0.92 * rate, channels * _ll128_ring(group)), "Simple": rate}
        return ring[protocol] * GB
    rate = min(0.92 * rate, channels * _TREE[arch][size])
    if protocol == "LL":
        rate = min(rate / 3.8, most_ll)
    if protocol == "LL128":
        rate = min(rate * (7 / 9 if group.nodes == 1 else 120 / 128), channels * _LL128_TREE[arch][size])
    return rate * GB


def _ll128_ring(group: Group) -> float:
    if group.link.arch == "blackwell":
        for below, rate in _LL128_RING_BLACKWELL:
            if group.nccl < below:
                return rate
    return _LL128_RING[group.link.arch]
