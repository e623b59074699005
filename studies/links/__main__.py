"""Fits the law of collectives to published tables and to the links that were measured, and judges it by machines that
it was not fitted to.

    python -m studies.links TABLES [--out reports/links/README.md] [--write]

TABLES is a folder of published ones (`studies/links/tables.py` says which). Fitted: eight A100s, B300s and RTX PRO
6000s, a host each, the sums of halves among them; two H200s that were measured here; NVLS, which only the H200s' table
has, to its all-reduces of eight GPUs. Held out: every other machine; and A100, B300 and the two H200s, once more, each
by terms of the others alone. `--write` replaces the shipped terms and deviations.

Published times are of collectives launched one by one, with a gap that replayed CUDA graphs have not: pairs of
A100s and B300s take 8 to 9 us for what two H200s do in 5 to 6. The gap is fitted to the ring's smallest sizes and is in
no forecast over NVLink, which is of the time on the GPUs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.links.choice import Regime
from flopcast.roofline.gpu.links.fitted import FILE, LARGE, CollectiveTime, Fitted, class_of, projected
from flopcast.roofline.gpu.links.law import Terms, is_by_channels, key_of, seconds
from studies.fitting import fit_parser, hand_over
from studies.links.figure import link_figure
from studies.links.tables import SUMS_OF_BYTES, Row, measured_rows, rows_of
from studies.markdown import table

MEASURED = "nvidia-h200, measured"
FIT = {"nvlink": ("a100_sxm", "b300_sxm", MEASURED), "pcie": ("rtx_pro_6000_server",)}
NVLS_MACHINE = "h200"
# NCCL's own figures, a third of the own part moved again, microseconds of growth: where the search begins, and what it
# is held to: a factor of 1.3 away costs as much as a row that is 10% off.
START = Terms(base=1.0, hop=1.0, share=1.0, copied=0.5, growth=5e-6)
NOISE, PRIOR = 0.1, 0.25
CROWDED_PRIOR = 1.0  # of how much more than two GPUs leave of a host's bridge: a host's own affair
# Of several hosts, of which one row tells its network, whatever the others give: switches, routes and tuner plugins
# differ. Small sizes have no row at all.
NETWORK_LARGE, NETWORK_SMALL = 0.3, 0.5
# Sends, and broadcasts, are of one machine each. vidur's sends read up to 314 GB/s on a link of 300: not timed to their
# end.
LAUNCH, LAUNCH_PRIOR = 4e-6, 0.7  # where the search of the gap begins, and how far its log may go
LAUNCH_KEY = "nvlink ring/LL"
UNJUDGED = Fitted(terms={}, sigma={}, source="")


def main() -> None:
    parser = fit_parser(__spec__, __doc__, "folder of the published tables", FILE)
    options = parser.parse_args()
    rows = [*rows_of(options.folder), *measured_rows()]
    launch = launch_seconds(rows)
    without = {
        name: fitted_terms(rows, launch, without=name) for names in FIT.values() if len(names) > 1 for name in names
    }
    terms = fitted_terms(rows, launch)
    judged = [(row, without.get(row.machine, terms)) for row in rows if counts(row)]
    found = deviations(judged, launch)
    least = {"network large": max(NETWORK_LARGE, found["network large"]), "network small": NETWORK_SMALL}
    sigma = {**found, **least, "network many small": found["network many large"]}
    tables = "nccl-tests of A100 SXM, B300, RTX PRO 6000 and H200"
    known = Fitted(terms=terms, sigma=sigma, source=f"published {tables}; two H200s measured here")
    shown = report(rows, known, without, launch)
    hand_over(shown, known, FILE, options)
    figure = link_figure([row for row in rows if row.machine == MEASURED], replace(known, terms=without[MEASURED]))
    if options.out and figure is not None:
        (options.out.parent / "pair.png").write_bytes(figure.png)


def is_nvls(row: Row) -> bool:
    return row.asked.regime.algorithm == "nvls"


def is_fitted(row: Row) -> bool:
    """Whether the shipped terms were fitted to a row."""
    if is_nvls(row):
        return row.machine == NVLS_MACHINE and row.asked.group.gpus == 8
    if row.asked.kind == "send_recv":
        return row.machine == MEASURED
    return row.machine in FIT[row.asked.group.link.kind] and row.dtype != SUMS_OF_BYTES


def counts(row: Row) -> bool:
    """Whether a row says how wide the intervals must be: all but those to which nothing else compares (NVLS, sends),
    sums of bytes, and times below 1 MiB that are the host's."""
    is_alone = is_nvls(row) or row.asked.kind == "send_recv" or row.dtype == SUMS_OF_BYTES
    return not (is_alone or (row.timed == "python" and row.asked.bytes < LARGE))


def gap_of(row: Row, launch: float) -> float:
    """Seconds of a row's time that are its launch's. Of a host with PCI Express nothing tells them apart: with NVLink's
    taken off two GPUs would reduce in 3.6 us, faster than over NVLink."""
    return 0.0 if row.timed == "graph" or row.asked.group.link.kind == "pcie" else launch


def launch_seconds(rows: Iterable[Row]) -> float:
    """The gap that published times have, fitted with the terms of the regime that the smallest sizes have."""
    some = [(row, row.asked.regime) for row in rows if is_fitted(row)]
    return _fit([(row, regime) for row, regime in some if key_of(row.asked, regime) == LAUNCH_KEY], None)[1]


def fitted_terms(rows: Iterable[Row], launch: float, without: str = "") -> dict[str, Terms]:
    """The terms of least log residuals, held to NCCL's own figures; by regime and kind of link."""
    groups: dict[str, list[tuple[Row, Regime]]] = defaultdict(list)
    for row in rows:
        if is_fitted(row) and row.machine != without:
            regime = row.asked.regime
            groups[key_of(row.asked, regime)].append((row, regime))
    return {key: _fit(some, launch)[0] for key, some in sorted(groups.items())}


def _fit(rows: Sequence[tuple[Row, Regime]], launch: float | None) -> tuple[Terms, float]:
    """The terms, and the gap of a launch, which is fitted where none is given."""
    measured = np.log([row.seconds for row, _ in rows])
    crowds = {row.asked.group.gpus > 2 for row, _ in rows} == {True, False}
    has_bridge = rows[0][0].asked.group.link.kind == "pcie" and crowds
    by_channels = is_by_channels(rows[0][0].asked, rows[0][1])
    names = ["base", "hop", "share", *(["channel"] if by_channels else ["copied", "growth"])]
    names += ["crowded"] if has_bridge else []
    begin = np.log([getattr(START, name) for name in names])
    widths = np.array([CROWDED_PRIOR if name == "crowded" else PRIOR for name in names])
    if launch is None:
        begin, widths = np.append(begin, math.log(LAUNCH)), np.append(widths, LAUNCH_PRIOR)

    def gap(logs: Array) -> float:
        return math.exp(logs[-1]) if launch is None else launch

    def terms_of(logs: Array) -> Terms:
        return replace(START, **dict(zip(names, map(float, np.exp(logs[: len(names)])), strict=True)))

    def residuals(logs: Array, /) -> Array:
        terms = terms_of(logs)
        found = np.log([seconds(row.asked, regime, terms) + gap_of(row, gap(logs)) for row, regime in rows])
        return np.concatenate([(found - measured) / NOISE, (logs - begin) / widths])

    found = least_squares(residuals, begin, loss="soft_l1").x
    return terms_of(found), gap(found)


def deviations(judged: Iterable[tuple[Row, Mapping[str, Terms]]], launch: float) -> dict[str, float]:
    """The deviation of log seconds by class: that by which nine in ten rows lie in the interval of 90%, each machine
    counted alike, however many rows it has."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, terms in judged:
        known = replace(UNJUDGED, terms=terms)
        regime = row.asked.regime
        time = seconds(row.asked, regime, known.terms_of(row.asked, regime)) + gap_of(row, launch)
        found[class_of(row.asked)][row.machine].append(abs(math.log(time / row.seconds)))
    return {name: _nine_in_ten(list(machines.values())) / Z_90 for name, machines in sorted(found.items())}


def _nine_in_ten(machines: Sequence[Sequence[float]]) -> float:
    weighed = sorted((residual, 1.0 / len(some) / len(machines)) for some in machines for residual in some)
    shares = np.cumsum([weight for _, weight in weighed])
    return weighed[min(int(np.searchsorted(shares, 0.9)), len(weighed) - 1)][0]


# --- tables


def report(rows: Sequence[Row], known: Fitted, without: Mapping[str, Mapping[str, Terms]], launch: float) -> str:
    """The errors by machine, of rows held out and of those fitted."""
    alone = {name: replace(known, terms=terms) for name, terms in without.items()}
    held = [row for row in rows if not is_fitted(row)]
    told = (
        f"{sum(map(is_fitted, rows)):,} rows fitted, {len(held):,} of machines and cases that were not; "
        f"{sum(row.machine == MEASURED for row in rows)} of them measured here, the others published. "
        "Errors are absolute, of a forecast by the link's datasheet alone, over the measured time; the interval is "
        f"that of 90%. Published times have {launch * 1e6:.1f} µs of a launch over NVLink, which the forecasts that "
        "they are compared with are given, too; over PCI Express it is part of the forecast. Below 1 MiB a collective "
        "takes its latency; those of h200 and of the other hosts of A100s are there the host's, which launches from "
        "Python. vidur's sends read up to 314 GB/s on a "
        "link of 300, so that they were not timed to their end; l40s copies between more than two GPUs at 2 to 6 GB/s. "
        "Neither is dropped. SimAI's shares of the line rate are taken as those of hosts of eight H100s, 400 Gbit/s "
        "each: neither GPU nor collective is told. The B300s' folder 2.27 is no version and is taken as 2.29.2, the "
        "other one's, whose times it has. `python -m studies.links TABLES`."
    )
    picture = f"![Bus bandwidth of {MEASURED}, and the law by terms of the others alone](pair.png)"
    parts = ["# The law of collectives", "", told, "", picture]
    for size, is_wanted in (("From 1 MiB on", True), ("Below 1 MiB", False)):
        some = [row for row in rows if (row.asked.bytes >= LARGE) is is_wanted]
        fit = [row for row in some if is_fitted(row)]
        others = _table([row for row in fit if row.machine in alone],
                        lambda row: alone[row.machine], launch)  # fmt: skip
        never = _table([row for row in some if not is_fitted(row)], lambda row: known, launch)
        parts += ["", f"## {size}", "", "Held out: the machine, by terms of the others alone", "", others]
        parts += ["", "Held out: never fitted", "", never, "", "Fitted", "", _table(fit, lambda row: known, launch)]
    head = ["regime", "base", "hop", "share", "copied", "growth µs", "crowded", "channel"]
    shown = [
        [key, *(f"{value:.3g}" for value in (t.base, t.hop, t.share, t.copied, t.growth * 1e6, t.crowded, t.channel))]
        for key, t in known.terms.items()
    ]
    sigmas = [[name, f"{value:.3f}", f"{math.expm1(Z_90 * value):.0%}"] for name, value in known.sigma.items()]
    return "\n".join([
        *parts, "", "## Terms, times NCCL's own figures", "", table(head, shown), "", "## Deviations of log seconds",
        "", table(["class", "deviation", "upper end"], sigmas),
    ])  # fmt: skip


def _table(rows: Sequence[Row], by: Callable[[Row], Fitted], launch: float) -> str:
    groups: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        regime = "NVLS" if is_nvls(row) else "sums of bytes" if row.dtype == SUMS_OF_BYTES else ""
        regime = {"send_recv": "send", "broadcast": "broadcast"}.get(row.asked.kind, regime)
        group = row.asked.group
        groups[row.machine, group.link.name, group.gpus, regime].append(row)
    head = ["machine", "link", "GPUs", "", "rows", "median", "90%", "worst", "in the interval"]
    lines = [
        [machine, link, str(gpus), regime, *_errors(some, by, launch)]
        for (machine, link, gpus, regime), some in groups.items()
    ]
    return table(head, [*lines, ["all", "", "", "", *_errors(rows, by, launch)]])


def _errors(rows: Sequence[Row], by: Callable[[Row], Fitted], launch: float) -> list[str]:
    if not rows:
        return ["0", *["-"] * 4]
    found = [(_with_gap(projected(row.asked, by(row)), gap_of(row, launch)), row.seconds) for row in rows]
    errors = [abs(time.seconds / real - 1.0) for time, real in found]
    inside = sum(time.low <= real <= time.high for time, real in found)
    shown = [f"{value:.1%}" for value in (median(errors), float(np.quantile(errors, 0.9)), max(errors))]
    return [str(len(rows)), *shown, f"{inside / len(rows):.0%}"]


def _with_gap(time: CollectiveTime, gap: float) -> CollectiveTime:
    return time._replace(seconds=time.seconds + gap)


if __name__ == "__main__":
    main()
