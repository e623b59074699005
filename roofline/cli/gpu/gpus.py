"""`flopcast gpus`: lists the known profiles and hosts, and how each was obtained."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from flopcast.roofline.cli.shared.options import AsJson
from flopcast.roofline.cli.shared.output import emit


def gpus(
    hosts: Annotated[bool, Option("--hosts", help="List the hosts alone, for --host.")] = False, as_json: AsJson = False
) -> None:
    """Lists the profiles and hosts that are known, and how each came about."""
    from flopcast.roofline.gpu.library.profiles import known, known_hosts
    from flopcast.roofline.views.terminal.gpus import print_hosts, print_known

    if as_json:
        emit([entry.to_json() for entry in known_hosts()] if hosts else [entry.__dict__ for entry in known()])
        return
    if not hosts:
        print_known(known())
    print_hosts(known_hosts())
