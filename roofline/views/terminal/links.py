"""Prints the output of `flopcast gpus --links`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flopcast.roofline.base.units import NONE, three_digits
from flopcast.roofline.gpu.links.overview import SIZES, Cell, LinkOverview
from flopcast.roofline.views.terminal.console import print_table

CAPTION = (
    "all-reduce, with the 90% interval: latency at 1 KiB, bus bandwidth as nccl-tests counts it; launch excluded. "
    "`flopcast bench --suite collectives` measures this host's"
)


def print_links(found: Sequence[LinkOverview]) -> None:
    """Prints a table of the links within a host and one of networks, a row per number of GPUs, in µs and GB/s."""
    for title, of, is_network in (("within a host", "GPUs", False), ("between hosts", "hosts, a GPU each", True)):
        columns = ("link", "basis", "GB/s a direction", of, "latency, µs", "GB/s at 1 MiB", "GB/s at 256 MiB")
        some = [link for link in found if (link.kind == "network") is is_network]
        if not some:
            continue
        rows = [row for link in some for row in _rows(link)]
        print_table(f"Links {title}", columns, rows, CAPTION if some[-1] is found[-1] else None, ruled=False)


def _rows(link: LinkOverview) -> Iterator[list[str]]:
    line = NONE if link.bytes_per_second is None else three_digits(link.bytes_per_second / 1e9)
    named = [link.name, link.basis, line]
    for gpus in dict.fromkeys(cell.gpus for cell in link.cells):
        by_size = {cell.bytes: cell for cell in link.cells if cell.gpus == gpus}
        yield [*named, str(gpus), _latency(by_size[SIZES[0]]), *(_rate(by_size[size]) for size in SIZES[1:])]
        named = ["", "", ""]


def _latency(cell: Cell) -> str:
    time = cell.time
    return f"{_micro(time.seconds)} ({_micro(time.low)}-{_micro(time.high)})"


def _rate(cell: Cell) -> str:
    rate, time = cell.bus_bytes_per_second / 1e9, cell.time
    slow, fast = rate * time.seconds / time.high, rate * time.seconds / time.low
    return f"{three_digits(rate)} ({three_digits(slow)}-{three_digits(fast)})"


def _micro(seconds: float) -> str:
    return three_digits(seconds * 1e6)
