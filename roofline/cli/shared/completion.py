"""What the shell offers at TAB (`flopcast --install-completion`): names of GPUs, hosts, configs and values of options.

Names are looked up when the shell asks, not when the command line is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

# The variable by which typer's shell scripts ask. typer inspects each completion of each command, which would take a
# tenth of `flopcast --help`: it gets them only when a shell asks.
_IS_ASKED = "_FLOPCAST_COMPLETE" in os.environ


def gpus() -> Iterable[str]:
    from flopcast.roofline.gpu.library.profiles import names

    return names()


def hosts() -> Iterable[str]:
    from flopcast.roofline.gpu.library.profiles import user_hosts
    from flopcast.roofline.gpu.profile.host import host_files

    return [*host_files(), *host_files(user_hosts()), *gpus(), "none"]


def links() -> Iterable[str]:
    from flopcast.roofline.gpu.links import catalogue

    return catalogue.links()


def configs() -> Iterable[str]:
    from flopcast.roofline.stream.model.models import shipped_names

    return shipped_names()


def step_suites() -> Iterable[str]:
    from flopcast.roofline.validation.step_plans import SUITES

    return SUITES


Complete = Callable[[str], list[str]]


def one_of(known: Callable[[], Iterable[str]] | Iterable[str]) -> Complete | None:
    """Returns the completion of an option that takes one of `known`, GPUs also without "nvidia-"."""

    def complete(incomplete: str) -> list[str]:
        found = list(known() if callable(known) else known)
        short = [name.removeprefix("nvidia-") for name in found]
        return [name for name in dict.fromkeys((*found, *short)) if name.startswith(incomplete)]

    return complete if _IS_ASKED else None


def several_of(known: Callable[[], Iterable[str]]) -> Complete | None:
    """Returns the completion of an option that takes several of `known` with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        found = [name for name in known() if name not in before.split(",")]
        one = one_of(found)
        return [f"{before}{comma}{name}" for name in one(last)] if one else []

    return complete if _IS_ASKED else None
