"""Which link a name means: one that was measured (shipped, by this user, or a file), a datasheet's, or the usual one of
a GPU. An `Interconnect` answers how long collectives take on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from flopcast.errors import DataError, UsageError
from flopcast.files import cache_folder
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.catalogue.datasheets import gpu_meant, load_specs
from flopcast.roofline.gpu.links.catalogue import Link, find_link, link_of, links
from flopcast.roofline.gpu.links.choice import KINDS, NCCL, Group, Kind
from flopcast.roofline.gpu.links.contention import Bound, Contended, Contention, contended
from flopcast.roofline.gpu.links.fitted import CollectiveTime, projected
from flopcast.roofline.gpu.links.law import Collective
from flopcast.roofline.gpu.links.profile import Copy, HostCost, LinkProfile

SHIPPED = DATA / "links"
MOST_BYTES = 2**50  # of one collective: beyond it nothing was ever measured
# Seconds of host per collective launched from Python, where it was not measured: published times that do not change
# from 32 to 512 KiB are the host's, 39 µs among eight H200s (torch 2.9), 45 to 60 µs among A100s (2024).
UNMEASURED_LAUNCH = 40e-6
ASSUMED_FROM = "nvidia-h200"  # whose contention stands for links of which none was measured
NETWORK = "ib-400"  # what joins hosts where nothing is said


def user_links() -> Path:
    """Where `flopcast fit` keeps the links that this user measured."""
    return cache_folder("links")


def measured_copies(gpu: str) -> tuple[Sequence[Copy], str]:
    """The copies between host and GPU that were measured, and of which GPU: of this one, else of `ASSUMED_FROM`."""
    for name in (gpu, ASSUMED_FROM):
        with suppress(UsageError, DataError):
            profile = find_interconnect(name).profile
            if profile is not None and profile.copies:
                return profile.copies, profile.gpu
    raise DataError(f"no link of {ASSUMED_FROM} with copies is shipped: reinstall flopcast")


@dataclass(frozen=True)
class Interconnect:
    """What joins GPUs: a link within a host, as its datasheet or a measured profile has it, and a network between
    hosts. `nvls`: whether NCCL may let NVSwitch add up."""

    link: Link
    profile: LinkProfile | None = None
    network: Link | None = None
    nvls: bool = True

    @property
    def name(self) -> str:
        """The name by which it is found again."""
        return self.link.name if self.profile is None else self.profile.name

    @property
    def basis(self) -> str:
        """measured or projected."""
        return "projected" if self.profile is None else "measured"

    @cached_property
    def _nccl(self) -> tuple[int, ...]:
        text = "" if self.profile is None else self.profile.nccl
        found = tuple(int(part[:6]) for part in text.split(".") if part.isdecimal())
        return found or NCCL

    def asked(self, kind: Kind, whole: float, gpus: int, nodes: int = 1) -> Collective:
        """A collective of so many bytes, as nccl-tests counts them: all-reduce, broadcast, send: the buffer;
        all-gather: what each GPU has afterwards; reduce-scatter, all-to-all: what it had before. Raises UsageError for
        what cannot be."""
        if kind not in KINDS:
            raise UsageError(f"collective {kind!r}: valid are {', '.join(KINDS)}")
        if not 1 <= whole <= MOST_BYTES:
            raise UsageError(f"bytes is {whole}: valid is 1 to {MOST_BYTES}")
        network = (self.network or find_link(NETWORK, network=True)) if nodes > 1 else None
        profile = self.profile  # which says nothing of NVLS among more GPUs than its host has
        nvls = self.nvls and (profile is None or profile.nvls or (nodes == 1 and gpus not in profile.measured_gpus()))
        return Collective(kind, whole, Group(gpus, self.link, nodes, network, nvls, self._nccl))

    def time(self, kind: Kind, whole: float, gpus: int, nodes: int = 1, dtype: str = "bf16") -> CollectiveTime:
        """How long a collective takes on the GPUs (`asked` says what `whole` counts)."""
        asked = self.asked(kind, whole, gpus, nodes)
        return projected(asked) if self.profile is None else self.profile.time(asked, dtype)

    def host_cost(self, kind: Kind, gpus: int) -> HostCost:
        """What launching it costs the host: as measured, of this kind or of the next number of GPUs, else
        `UNMEASURED_LAUNCH`."""
        costs = () if self.profile is None else self.profile.host
        unknown = HostCost(kind, gpus, UNMEASURED_LAUNCH, None)
        return min(costs, key=lambda cost: (cost.kind != kind, abs(cost.gpus - gpus)), default=unknown)

    def contended(
        self, bound: Bound, kind: Kind, whole: float, gpus: int, nodes: int = 1, dtype: str = "bf16", *,
        kernel_seconds: float = 0.0, kernel_blocks: int = 0, kernel_bytes: float | None = None,
        multiprocessors: int | None = None, bandwidth: float | None = None,
    ) -> Contended:  # fmt: skip
        """What a kernel that takes `kernel_seconds` by itself and a collective lose to each other. `bound`: a matrix
        product, of `kernel_blocks` (`Profile.blocks` says how many), attention, or what memory bounds, of so many bytes
        that memory (not L2) moves; where they are not known, as many as it can. `multiprocessors` and `bandwidth`,
        its memory's bytes/s: the GPU's, by default those of the GPU that was measured. A link of which nothing was
        measured beside kernels has the parameters of the link that ships (`ASSUMED_FROM`)."""
        own = None if self.profile is None else self.profile.contention
        known = own or _assumed_contention()
        held = self.time(kind, whole, gpus, nodes, dtype).blocks
        full = kernel_seconds * (bandwidth or known.bandwidth)
        return contended(
            known, bound, held, multiprocessors=multiprocessors or known.multiprocessors, seconds=kernel_seconds,
            blocks=kernel_blocks, memory_share=kernel_bytes / full if kernel_bytes is not None and full else 1.0,
        )  # fmt: skip


@cache
def _assumed_contention() -> Contention:
    found = LinkProfile.load(SHIPPED / f"{ASSUMED_FROM}.json").contention
    if found is None:
        raise DataError(f"{SHIPPED / ASSUMED_FROM}.json holds no contention: the installation is damaged")
    return found


def find_interconnect(name: str, network: str | None = None, *, nvls: bool = True) -> Interconnect:
    """What a name means: a measured link (its name, a file, or the GPU that it was measured on), a link of the
    catalogue, or a GPU, whose usual link is taken. Raises UsageError for any other."""
    joined_by = None if network is None else find_link(network, network=True)
    profile = _profile(name)
    if profile is not None:
        return replace(interconnect_of(profile), network=joined_by, nvls=nvls)
    if name in links():
        return Interconnect(find_link(name), None, joined_by, nvls)
    try:
        gpu = gpu_meant(name, load_specs())
    except UsageError:
        inside = [link.name for link in links().values() if link.kind != "network"]
        known = [*measured_links(), *inside]
        raise UsageError(
            f"unknown link {name!r}: valid are {', '.join(known)}, a GPU's name, or the file of a link; "
            "`flopcast bench --suite collectives --out DIR` and `flopcast fit DIR` measure this host's"
        ) from None
    own = next((found for found in _measured() if found.gpu == gpu), None)
    usual = link_of(gpu)
    if own is None and usual is None:
        raise UsageError(f"no link is known of {gpu}: give one of {', '.join(links())}")
    return find_interconnect(own.name if own else usual.name if usual else "", network, nvls=nvls)


def interconnect_of(profile: LinkProfile) -> Interconnect:
    """A measured link, with the datasheet's that the law needs for what was not measured: PCI Express where none is
    known."""
    return Interconnect(find_link(profile.link or "pcie4"), profile)


def measured_links() -> dict[str, Path]:
    """The links that were measured, name -> file: those that ship, then this user's own; a shipped one wins over the
    user's of the same name."""
    shipped, own = ({path.stem: path for path in sorted(folder.glob("*.json"))} for folder in (SHIPPED, user_links()))
    return {**shipped, **{name: path for name, path in own.items() if name not in shipped}}


def known_links() -> list[Interconnect]:
    """All that a name finds, measured ones first; networks apart (`catalogue.links`)."""
    return [
        *map(interconnect_of, _measured()),
        *(Interconnect(link) for link in links().values() if link.kind != "network"),
    ]


def _measured() -> Iterator[LinkProfile]:
    for path in measured_links().values():
        yield LinkProfile.load(path)


def _profile(name: str) -> LinkProfile | None:
    path = measured_links().get(name) or Path(name)
    if path.suffix == ".json" or path.is_file():
        return LinkProfile.load(path)
    return None
