"""Chooses one kernel time per measured row from its two readings, the timer's and the profiler's. numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flopcast.kernels.shapes import shape_from_json
from flopcast.microbench.records.rows import HostRow, OperationRow, OperatorRow, Row
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import GemmVariant

# Rows of at least this time are long: their timer and profiler differ because of clocks, not of caches.
LONG_SECONDS = 100e-6
FEWEST_ROWS = 100  # a process with fewer rows takes the gap of all processes
FAST_QUANTILE = 0.1
# Classes whose kernels write almost nothing (scans, which do write, count as reductions), or whose tables are so large
# that rotating operands leaves their rows in L2.
READING = ("reduction", "loss", "embedding")
# Most operand sets that the timer rotates over: calls that would need more find their operands in L2 again.
MOST_SETS = 256


class FitRow(OperationRow, HostRow, OperatorRow, total=False):
    """A row of any kind as fits read it, with the time taken from its readings."""

    taken_seconds: float | None  # device seconds per execution
    by_card: dict[str, float]  # of a median row: the time or value taken from each card


def work_of(row: Row) -> Work:
    """Describes the work of the row's shape. Raises KeyError, TypeError, ValueError or IndexError if it is no shape."""
    return describe(shape_from_json(row["shape"] or {}), row.get("backend", "torch"))


def taken_seconds(row: FitRow, op_class: str, gap: float) -> float | None:
    """Device seconds per execution, chosen from the profiler's and the timer's readings.

    The profiler reads after a flush where operands are cold; the timer reads executions back to back over rotating
    operands, minus the gap between kernels. They differ by what lies in L2: a flush leaves it full of lines that are
    still to be written to memory, rotating operands leave their results, as the preceding kernels of a step do. Other
    disturbances only add time, so the smaller reading is taken.

    Two exceptions take the profiler's: operands that rotating does not make cold, because they are few bytes of large
    tables or too small for MOST_SETS sets to fill the L2; and kernels that mostly read, which pay for the lines to be
    written (the loss of log-softmax 18.5 us against 8.4, in a step 18.4). Rows from LONG_SECONDS on take the faster
    samples, before the clocks sank. A row that `with_taken` has processed keeps the time taken then."""
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
    """Seconds that graph replay adds to a single kernel's duration.

    The median over rows of one kernel under 50 us, where the gap exceeds the noise of the difference; a negative one,
    where the profiler reads longer than the timer, counts as 0. None without such rows."""
    gaps = _gaps(rows)
    if not gaps:
        return None
    low, middle, high = (float(max(q, 0.0)) for q in np.quantile(gaps, [0.05, 0.5, 0.95]))
    return Number(middle, low, high, "measured", f"{len(gaps)} rows of one kernel under 50 us")


def _gap_of(rows: Iterable[Row]) -> float | None:
    """As `graph_gap_of`, but negative where the profiler reads longer, so that two processes' readings agree."""
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
    """Returns one card's rows, those of shapes with `taken_seconds`, by the gap between kernels of the process that
    measured the row.

    Graphs leave 0.2 us more between kernels in a process that has trained than in one that has not; without the gap
    per process, the timers of two runs would differ by that in every short row.

    Unaligned products that were not timed, but profiled in turn with others at the power limit, are scaled to the
    highest clock, at which all others ran: of batches at 1,500 to 1,850 MHz of 1,980 those of 2 and 4 were 3.2% off an
    older H200 profile, odd ones 5.4%, at 1,980 MHz 0.9 and 0.3%; aligned ones, which draw less power, 0.0 and
    -0.3%."""
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
