"""Which profile a name means: shipped, measured by this user, projected from a datasheet (and refined by published
times, where such ship), or a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopcast.decode import load
from flopcast.errors import UsageError
from flopcast.files import cache_folder
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.catalogue.datasheets import SPECS_FILE, find_spec, gpu_meant, load_specs
from flopcast.roofline.gpu.library import profile_cache
from flopcast.roofline.gpu.profile.host import DEFAULT, HOSTS, NO_HOST, HostCosts, default_host, host_files, host_in
from flopcast.roofline.gpu.profile.profile import PROFILE_BASES, PROFILES, Profile

if TYPE_CHECKING:
    from flopcast.roofline.gpu.projection.published_fit import Record

# The measured profile that the others are projected from.
SOURCE = "nvidia-h200"
HOST_FILE = HOSTS / f"{DEFAULT}.json"
# Parameters fitted to published times, one file per GPU.
PUBLISHED = DATA / "published"


@dataclass(frozen=True)
class Known:
    """A name that `--gpu` takes, and how its profile comes about."""

    name: str
    basis: str
    source: str


def user_folder() -> Path:
    """Where `flopcast fit` keeps the profiles of this user's machines."""
    return cache_folder("profiles")


def user_hosts() -> Path:
    """Where `flopcast fit` keeps the hosts that this user measured."""
    return cache_folder("hosts")


@dataclass(frozen=True)
class KnownHost:
    """A name that `--host` takes besides the profiles' own."""

    name: str
    source: str
    costs: HostCosts

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.costs), "name": self.name, "source": self.source}


def known_hosts() -> list[KnownHost]:
    """The hosts that ship, then this user's own; a shipped one wins over the user's of the same name."""
    shipped = host_files()
    found = [KnownHost(name, "shipped", HostCosts.load(path)) for name, path in shipped.items()]
    own = {name: path for name, path in host_files(user_hosts()).items() if name not in shipped}
    return found + [KnownHost(name, str(path), HostCosts.load(path)) for name, path in own.items()]


def known() -> list[Known]:
    """All names, measured ones first."""
    shipped = known_profiles()
    found = [Known(name, "measured", _shipped_source(name)) for name in sorted(shipped)]
    found += [
        Known(n, Profile.load(p).basis, str(p))
        for n, p in sorted(known_profiles(user_folder()).items())
        if n not in shipped
    ]
    names = {entry.name for entry in found}
    if SOURCE in shipped:
        found += [_projected_entry(name) for name in load_specs() if name not in names]
    return sorted(found, key=lambda entry: PROFILE_BASES.index(entry.basis))


def _shipped_source(name: str) -> str:
    lender = lender_of(name)
    return "shipped" if lender is None else f"shipped; kinds not measured scaled from {lender}"


def _projected_entry(name: str) -> Known:
    record = published_record(name)
    plain = f"datasheet, scaled from {SOURCE}"
    if record is None:
        return Known(name, "projected", plain)
    if record["gpu"] != name:
        return Known(name, "projected", f"{plain}, and by the published times of {record['gpu']}")
    return Known(name, "published", f"{plain}, and refined by {record['source']}")


def find_profile(name_or_path: str) -> Profile:
    """The profile of a known name, in any spelling that means one alone (`gpu_meant`), or of a profile file.

    What ships is fed by the shipped host; a profile that the user measured keeps the host that it was measured in.

    Raises UsageError for a name that is neither, naming the known ones and how to measure one, and for a folder;
    DataError for a file that is no profile.
    """
    name_or_path = name_meant(name_or_path)
    shipped, own = known_profiles(), known_profiles(user_folder())
    path = shipped.get(name_or_path) or own.get(name_or_path) or Path(name_or_path)
    if name_or_path in shipped:
        lender = lender_of(name_or_path)
        more = [] if lender is None else [shipped[lender], SPECS_FILE]
        return profile_cache.load(
            name_or_path, [path, HOST_FILE, *more], lambda: completed(Profile.load(path)).with_host(default_host())
        )
    if name_or_path in own or (path.is_file() or path.suffix in (".json", ".gz") or "/" in name_or_path):
        return profile_cache.load("file", [path], lambda: Profile.load(path))
    if name_or_path in load_specs() and SOURCE in shipped:
        sources = [shipped[SOURCE], HOST_FILE, SPECS_FILE, *sorted(PUBLISHED.glob("*.json"))]
        return profile_cache.load(name_or_path, sources, lambda: _projected(name_or_path))
    raise UsageError(
        "no profile of this machine's processor yet: measure it with `flopcast bench --device cpu --out DIR` "
        "and `flopcast fit DIR`"
    )


def name_meant(name_or_path: str) -> str:
    """The known name that `--gpu` means by a name, "cpu", or the path of a profile file as it is.

    Raises UsageError for a name that means no known GPU, or several, and for a folder."""
    known = names()
    if name_or_path in known or name_or_path == "cpu":
        return name_or_path
    path = Path(name_or_path)
    if name_or_path and path.is_dir():
        raise UsageError(
            f"{name_or_path} is a folder: give a GPU's name or a profile file; of a folder of measurements "
            f"`flopcast fit {name_or_path}` makes one"
        )
    if path.is_file() or path.suffix in (".json", ".gz") or "/" in name_or_path:
        return name_or_path
    return gpu_meant(name_or_path, known)


def lender_of(name: str) -> str | None:
    """Whose profile lends the shipped profile of this name the kinds of kernel that it did not measure: SOURCE's, and
    SOURCE itself borrows of the others that ship. None where nothing does."""
    shipped = known_profiles()
    if name not in shipped or name not in load_specs():
        return None
    others = [SOURCE] if name != SOURCE else sorted(shipped.keys() - {SOURCE})
    return next((other for other in others if other in shipped and other in load_specs()), None)


def completed(profile: Profile) -> Profile:
    """A measured profile of a GPU whose profile ships, with the kinds of kernel that it did not measure projected; any
    other as it is."""
    from flopcast.roofline.gpu.projection.complete import complete

    lender = lender_of(profile.gpu)
    if profile.basis != "measured" or lender is None:
        return profile
    return complete(profile, Profile.load(known_profiles()[lender]), find_spec(profile.gpu), find_spec(lender))


def _projected(name: str) -> Profile:
    """`projection`, refined by published times where such ship."""
    from flopcast.roofline.gpu.projection.published_fit import apply

    record = published_record(name)
    plain = projection(name)
    return plain if record is None else apply(plain, record)


def projection(name: str, source: str = SOURCE) -> Profile:
    """The profile of a GPU from its datasheet and the shipped profile of `source` alone, without any published or
    measured times of it: nor those that it lends to `source`.

    Raises UsageError for a GPU that is not known."""
    from flopcast.roofline.gpu.projection.project import project

    known = find_profile(source)
    if lender_of(source) == name:
        known = replace(known, surfaces=known.own_surfaces)
    return project(known, find_spec(name))


def published_record(name: str) -> Record | None:
    """What ships of published times for a GPU (`published_fit.refine` made it): its own, else that of the same chip on
    another board; None where there is none."""
    spec = load_specs()[name]
    for path in sorted(PUBLISHED.glob("*.json"), key=lambda path: path.stem != name):
        board = load_specs()[path.stem]
        if path.stem == name or (board.arch, board.sm_count) == (spec.arch, spec.sm_count):
            from flopcast.roofline.gpu.projection.published_fit import Record

            return load(Record, path, "a fit to published times", hint="`flopcast import` makes one")
    return None


def names() -> list[str]:
    """The names of `known`, without reading the profiles: shipped first, then the user's own, refined last."""
    shipped = known_profiles()
    found = [*sorted(shipped), *sorted(name for name in known_profiles(user_folder()) if name not in shipped)]
    specs = [name for name in load_specs() if name not in found] if SOURCE in shipped else []
    refined = {path.stem for path in PUBLISHED.glob("*.json")}
    return found + sorted(specs, key=lambda name: name in refined)


def find_host(name_or_path: str | None) -> HostCosts | None:
    """Host costs by a host's name or file, or by the name or file of a GPU's profile, whose host is meant; None stands
    for the profile's, which is the shipped host unless the user measured the profile; "none" for no host at all.

    Raises UsageError for a name that is none of these, or a profile without a host; DataError for a malformed file.
    """
    if name_or_path is None:
        return None
    if name_or_path == "none":
        return NO_HOST
    kept = {**host_files(user_hosts()), **host_files()}
    if name_or_path in kept:
        return HostCosts.load(kept[name_or_path])
    if Path(name_or_path).is_file() and (found := host_in(Path(name_or_path))) is not None:
        return found
    try:
        host = find_profile(name_or_path).host
    except UsageError as fault:
        if name_or_path == "cpu":
            raise
        raise UsageError(
            f"unknown host {name_or_path!r}: neither a host ({', '.join(sorted(kept)) or 'none is known'}) nor a GPU's "
            f"profile ({fault}); `flopcast bench --suite host --out DIR` and `flopcast fit DIR` measure this host"
        ) from None
    if host is None:
        raise UsageError(f"profile {name_or_path!r} has no host costs: choose another --host, or `none`")
    return host


def find_profiles(gpus: Iterable[str]) -> list[Profile]:
    return [find_profile(name) for name in gpus]


def known_profiles(folder: Path = PROFILES) -> dict[str, Path]:
    """The shipped profiles, name -> file."""
    found: dict[str, Path] = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            for suffix in (".json", ".json.gz"):
                if path.name.endswith(suffix) and not path.name.startswith("."):
                    found[path.name.removesuffix(suffix)] = path
    return found
