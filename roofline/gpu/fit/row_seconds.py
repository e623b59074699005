"""What is taken of a measured row for a profile: of two readings, the timer's and the profiler's, one time. numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flopcast.kernels.shapes import shape_from_json
from flopcast.microbench.records.rows import HostRow, OperationRow, OperatorRow, Row
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import GemmVariant

# From here on a row is long: what the timer and the profiler differ by is clocks, not caches.
LONG_SECONDS = 100e-6
FEWEST_ROWS = 100  # of a process, below which its gap is taken to be that of all
FAST_QUANTILE = 0.1
# Classes whose kernels write next to nothing (scans, which do, count as reductions), or whose tables are so large that
# rotating leaves their rows in L2.
READING = ("reduction", "loss", "embedding")
# Operand sets that the timer rotates over at most: smaller calls find theirs in L2 again.
MOST_SETS = 256


class FitRow(OperationRow, HostRow, OperatorRow, total=False):
    """A row of any kind as fits read it, with what is taken of its readings."""

    taken_seconds: float | None  # of the device, one execution
    by_card: dict[str, float]  # of several cards, what was taken of each


def work_of(row: Row) -> Work:
    """What the row's shape asks of a kernel. Raises KeyError, TypeError, ValueError or IndexError for no shape."""
    return describe(shape_from_json(row["shape"] or {}), row.get("backend", "torch"))


def taken_seconds(row: FitRow, op_class: str, gap: float) -> float | None:
    """Device seconds of one execution, from two readings: the profiler's, after a flush where cold, and the timer's,
    back to back over rotating operands, less the gap between kernels.

    They differ by what lies in L2: a flush leaves it full of lines that have yet to be written to memory, rotating
    operands leave their results, as in a step the kernels before do. Whatever else disturbs a reading only adds time:
    the least. But rotating does not make operands cold that are few bytes of large tables, or fewer than MOST_SETS
    can fill the L2 with, and kernels that mostly read pay for lines to be written (the loss of log-softmax 18.5 us
    against 8.4, in a step 18.4): theirs is the profiler's. Of samples from LONG_SECONDS on the faster, before the
    clocks sank. A row `with_taken` has been through keeps what was taken then."""
    if taken := row.get("taken_seconds"):
        return float(taken)
    seen, timed = row.get("kernel_seconds"), row.get("seconds")
    if not timed:
        return None if seen is None else float(seen)
    is_long = timed >= LONG_SECONDS
    if is_long and row.get("samples"):
        timed = float(np.quantile(row["samples"], FAST_QUANTILE))
    back_to_back = max(timed - gap * max(len(row.get("kernels") or ()), 1), 0.1 * timed)
    if not seen or back_to_back >= seen:
        return float(seen or back_to_back)
    if is_long:
        return back_to_back
    is_hot = row.get("cache") == "hot"
    stays = op_class in READING or (row.get("sets") or 1) >= MOST_SETS
    return float(seen) if stays and not is_hot else back_to_back


def graph_gap_of(rows: Iterable[Row]) -> Number | None:
    """What graph replay adds to a single kernel's duration, seconds: median over rows of one kernel under 50 us, where
    the gap is more than the noise of the difference; none where the profiler reads longer than the timer."""
    gaps = _gaps(rows)
    if not gaps:
        return None
    low, middle, high = (float(max(q, 0.0)) for q in np.quantile(gaps, [0.05, 0.5, 0.95]))
    return Number(middle, low, high, "measured", f"{len(gaps)} rows of one kernel under 50 us")


def _gap_of(rows: Iterable[Row]) -> float | None:
    """As `graph_gap_of`, and negative where the profiler reads longer: it makes the readings of two processes alike."""
    gaps = _gaps(row for row in rows if row["status"] == "ok")
    return float(np.median(gaps)) if gaps else None


def _gaps(rows: Iterable[Row]) -> list[float]:
    return [
        seconds - seen
        for row in rows
        if row.get("shape") and row.get("timer") == "graph" and (seconds := row.get("seconds"))
        if 0 < (seen := row.get("kernel_seconds") or 0.0) < 50e-6 and len(row.get("kernels") or ()) == 1
    ]


def with_taken(rows: Sequence[FitRow]) -> list[FitRow]:
    """The rows of one card, those of shapes with the `taken_seconds` of each, by the gap between kernels of the process
    that wrote it. Unaligned products that were not timed but profiled in turn with others, at the power limit, are
    brought to the highest clock, as all others ran: of batches at 1,500 to 1,850 MHz of 1,980 those of 2 and 4 were
    3.2% off an older H200 profile, odd ones 5.4%, at 1,980 MHz 0.9 and 0.3%; aligned ones, which take less, 0.0 and
    -0.3%.

    Graphs leave 0.2 us more between kernels in a process that has trained than in one that has not, which two runs'
    bare timers would differ by in every short row."""
    whole = _gap_of(rows) or 0.0
    runs: dict[str | None, list[FitRow]] = {}
    for row in rows:
        runs.setdefault(row.get("run"), []).append(row)
    gaps = {
        run: whole if len(members) < FEWEST_ROWS or (gap := _gap_of(members)) is None else gap
        for run, members in runs.items()
    }
    highest = max((row.get("clock_mhz") or 0.0 for row in rows), default=0.0)
    return [{**row, "taken_seconds": _taken(row, gaps[row.get("run")], highest)} for row in rows]


def _taken(row: FitRow, gap: float, highest: float) -> float | None:
    if row["status"] != "ok" or not row.get("shape"):
        return None
    if taken := row.get("taken_seconds"):
        return float(taken)
    try:
        work = work_of(row)
    except (KeyError, TypeError, ValueError, IndexError):
        return None  # the fit warns of it
    seconds = taken_seconds(row, work.op_class, gap)
    is_unaligned = isinstance(work.variant, GemmVariant) and not work.variant.is_aligned
    if seconds and is_unaligned and not row.get("seconds") and (clock := row.get("clock_mhz")):
        return seconds * float(clock) / highest
    return seconds
