"""Profiles as they were last used, kept beside the streams in the user's cache: read, projected, and with what their
surfaces computed for earlier questions (the points in the laws' terms, the inverses of their covariances).

Reading the H200's profile takes 75 ms and computing what a Qwen3 asks of it 150 ms; a projected GPU, whose surfaces
are solved anew, takes up to 3 s; a cached profile takes 10 ms. A process that has loaded a profile has it at hand. A
file is a pickle, as its objects are, named after the content of everything that it follows from: the profile's files,
this package's sources, the versions of Python and numpy. It is read only if it is the user's own, and may name nothing
but the classes of a profile; a file that cannot be read is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flopcast.files import cache_folder, read_own, write
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.profile.gaussian_process import Coordinates, Residual
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.host_graphs import GraphCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import State, Surface
from flopcast.roofline.stream.lowering.variants import (
    AttentionVariant,
    CallVariant,
    ConvVariant,
    GemmVariant,
    KernelKind,
    SurfaceKey,
)

MOST_FILES = 32  # of some 5 MB, twice the known GPUs; the least recently made go


class _Known(NamedTuple):
    profile: Profile
    path: Path
    cached_parts: int


_loaded: list[_Known] = []  # what this process loaded, for `keep` and to load it no more than once; few
_MOST_LOADED = 32


def folder() -> Path:
    return cache_folder("prepared")


def load(name: str, sources: Sequence[Path], make: Callable[[], Profile]) -> Profile:
    """The profile that `make` makes of the files `sources`: the one that this process loaded before, else as it was
    last kept, else made now.

    Raises what `make` raises.
    """
    try:
        path = folder() / f"{_key(name, sources)}.pickle"
    except OSError:  # `make` says what is missing
        return make()
    for i, known in enumerate(_loaded):
        if known.path == path:
            return known.profile
        if known.path.name == path.name:  # of the same content, and the user's cache is another folder now
            _loaded[i] = _Known(known.profile, path, -1)
            return known.profile
    profile = _read(path)
    count = -1  # not kept yet
    if profile is None:
        profile = make()
    else:
        count = _cached_parts(profile)
    _loaded.append(_Known(profile, path, count))
    del _loaded[:-_MOST_LOADED]
    return profile


def keep(profile: Profile) -> None:
    """Keeps a profile that `load` returned for the next process, if more of it is computed than the file holds."""
    for i, known in enumerate(_loaded):
        if known.profile is profile and (count := _cached_parts(profile)) > known.cached_parts:
            with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not the answer
                _write(profile, known.path)
            _loaded[i] = known._replace(cached_parts=count)


def _cached_parts(profile: Profile) -> int:
    return sum(surface.cached_parts for surface in profile.surfaces.values())


# All that a file is made of. A pickle names what it calls to make its objects: any other name is refused, so that
# reading one runs nothing but these constructors.
_MADE_OF = {
    (each.__module__, each.__qualname__): each
    for each in (
        Profile, Number, HostCosts, GraphCosts, SurfaceKey, KernelKind, GemmVariant, AttentionVariant, ConvVariant,
        CallVariant, Surface, State, Residual, Coordinates, np.ndarray, np.dtype,
    )
}  # fmt: skip
_ARRAYS = ("_reconstruct", "_frombuffer", "scalar")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _MADE_OF.get((module, name))
        if known is not None:
            return known
        if name in _ARRAYS and module in ("numpy._core.multiarray", "numpy._core.numeric", "numpy.core.multiarray"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a profile")


def _read(path: Path) -> Profile | None:
    try:
        found = _Reader(io.BytesIO(read_own(path))).load()
    except FileNotFoundError:
        return None
    except Exception:  # torn, or of what is no more: whatever it raises, it is of no use
        return None
    return found if isinstance(found, Profile) else None


def _write(profile: Profile, path: Path) -> None:
    write(path, pickle.dumps(profile, protocol=5), private=True)
    files = sorted(path.parent.glob("*.pickle"), key=lambda file: file.stat().st_mtime)
    for old in files[:-MOST_FILES]:
        old.unlink(missing_ok=True)


def _key(name: str, sources: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{name}\n{_code()}\n".encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


@cache
def _code() -> str:
    """A text that changes with this package's sources and what runs them: names, sizes and times of the files."""
    found = [f"{sys.version_info[:3]} numpy{np.__version__}"]
    package = Path(__file__).resolve().parents[2]
    for part in (package, package.parent / "kernels"):
        for folder, _, names in os.walk(part):
            for name in sorted(names):
                if name.endswith(".py"):
                    status = os.stat(os.path.join(folder, name))
                    found.append(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(found)
