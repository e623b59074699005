"""`flopcast gpus`: lists the known profiles, hosts and links, and how each was obtained."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared.options import AsJson
from flopcast.roofline.cli.shared.output import emit


def gpus(
    hosts: Annotated[bool, Option("--hosts", help="List the hosts alone, for --host.")] = False,
    links: Annotated[
        bool, Option("--links", help="List what joins GPUs: latency and bandwidth, measured or projected.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the profiles, hosts and links that are known, and how each came about."""
    if links:
        if hosts:
            raise UsageError("--hosts and --links are two lists: ask for one")
        _list_links(as_json)
        return
    from flopcast.roofline.gpu.library.profiles import known, known_hosts
    from flopcast.roofline.views.terminal.gpus import print_hosts, print_known

    if as_json:
        emit([entry.to_json() for entry in known_hosts()] if hosts else [entry.__dict__ for entry in known()])
        return
    if not hosts:
        print_known(known())
    print_hosts(known_hosts())


def _list_links(as_json: bool) -> None:
    from flopcast.roofline.gpu.links.overview import overviews
    from flopcast.roofline.views.terminal.links import print_links

    found = overviews()
    if as_json:
        emit([link.to_json() for link in found])
    else:
        print_links(found)
