"""Fits the law of collectives to published tables, and judges it by machines that it was not fitted to.

    python -m studies.links TABLES [--out reports/links/README.md] [--write]

TABLES is a folder of them (`studies/links/tables.py` says which). Fitted: eight A100s, B300s and RTX PRO 6000s, a host
each, the sums of halves among them; NVLS, which only the H200s' table has, to its all-reduces of eight GPUs; a single
send, which only vidur's A100s have, to these. Held out: every other machine; and A100 and B300, once more, each by
terms of the other alone. `--write` replaces the shipped terms and deviations.
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
from flopcast.roofline.gpu.links.fitted import FILE, LARGE, Fitted, class_of, projected
from flopcast.roofline.gpu.links.law import Terms, key_of, seconds
from studies.fitting import fit_parser, hand_over
from studies.links.tables import SUMS_OF_BYTES, Row, rows_of
from studies.markdown import table

FIT = {"nvlink": ("a100_sxm", "b300_sxm"), "pcie": ("rtx_pro_6000_server",)}
NVLS_MACHINE = "h200"
# NCCL's own figures, a third of the own part moved again, microseconds of growth: where the search begins, and what it
# is held to: a factor of 1.3 away costs as much as a row that is 10% off.
START = Terms(base=1.0, hop=1.0, share=1.0, copied=0.5, growth=5e-6)
NOISE, PRIOR = 0.1, 0.25
CROWDED_PRIOR = 1.0  # of how much more than two GPUs leave of a host's bridge: a host's own affair
# Of several hosts, of which one row tells its network, whatever the others give: switches, routes and tuner plugins
# differ. Small sizes have no row at all.
NETWORK_LARGE, NETWORK_SMALL = 0.3, 0.5
BROADCAST_SIGMA = 0.35  # no published row
SEND_MACHINE = "a100, third host"
UNJUDGED = Fitted(terms={}, sigma={}, source="")


def main() -> None:
    parser = fit_parser(__spec__, __doc__, "folder of the published tables", FILE)
    options = parser.parse_args()
    rows = rows_of(options.folder)
    without = {name: fitted_terms(rows, without=name) for names in FIT.values() if len(names) > 1 for name in names}
    terms = fitted_terms(rows)
    judged = [(row, without.get(row.machine, terms)) for row in rows if counts(row)]
    found = deviations(judged)
    least = {"network large": max(NETWORK_LARGE, found["network large"]), "network small": NETWORK_SMALL}
    sigma = {**found, **least, "network many small": found["network many large"], "broadcast": BROADCAST_SIGMA}
    known = Fitted(terms=terms, sigma=sigma, source="published nccl-tests of A100 SXM, B300, RTX PRO 6000 and H200")
    shown = report(rows, known, without)
    hand_over(shown, known, FILE, options)


def is_nvls(row: Row) -> bool:
    return row.asked.regime.algorithm == "nvls"


def is_fitted(row: Row) -> bool:
    """Whether the shipped terms were fitted to a row."""
    if is_nvls(row):
        return row.machine == NVLS_MACHINE and row.asked.group.gpus == 8
    if row.asked.kind == "send_recv":
        return row.machine == SEND_MACHINE
    return row.machine in FIT[row.asked.group.link.kind] and row.dtype != SUMS_OF_BYTES


def counts(row: Row) -> bool:
    """Whether a row says how wide the intervals must be: all but those to which nothing else compares (NVLS, sends),
    sums of bytes, and times below 1 MiB that are the host's."""
    is_alone = is_nvls(row) or row.asked.kind == "send_recv" or row.dtype == SUMS_OF_BYTES
    return not (is_alone or (row.is_launched and row.asked.bytes < LARGE))


def fitted_terms(rows: Iterable[Row], without: str = "") -> dict[str, Terms]:
    """The terms of least log residuals, held to NCCL's own figures; by regime and kind of link."""
    groups: dict[str, list[tuple[Row, Regime]]] = defaultdict(list)
    for row in rows:
        if is_fitted(row) and row.machine != without:
            regime = row.asked.regime
            groups[key_of(row.asked, regime)].append((row, regime))
    return {key: _fit(some) for key, some in sorted(groups.items())}


def _fit(rows: Sequence[tuple[Row, Regime]]) -> Terms:
    measured = np.log([row.seconds for row, _ in rows])
    crowds = {row.asked.group.gpus > 2 for row, _ in rows} == {True, False}
    has_bridge = rows[0][0].asked.group.link.kind == "pcie" and crowds
    names = ["base", "hop", "share", "copied", "growth", *(["crowded"] if has_bridge else [])]
    begin = np.log([getattr(START, name) for name in names])
    widths = np.array([CROWDED_PRIOR if name == "crowded" else PRIOR for name in names])

    def terms_of(logs: Array) -> Terms:
        return replace(START, **dict(zip(names, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: Array, /) -> Array:
        terms = terms_of(logs)
        found = np.log([seconds(row.asked, regime, terms) for row, regime in rows])
        return np.concatenate([(found - measured) / NOISE, (logs - begin) / widths])

    return terms_of(least_squares(residuals, begin, loss="soft_l1").x)


def deviations(judged: Iterable[tuple[Row, Mapping[str, Terms]]]) -> dict[str, float]:
    """The deviation of log seconds by class: that by which nine in ten rows lie in the interval of 90%, each machine
    counted alike, however many rows it has."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, terms in judged:
        known = replace(UNJUDGED, terms=terms)
        regime = row.asked.regime
        time = seconds(row.asked, regime, known.terms_of(row.asked, regime))
        found[class_of(row.asked)][row.machine].append(abs(math.log(time / row.seconds)))
    return {name: _nine_in_ten(list(machines.values())) / Z_90 for name, machines in sorted(found.items())}


def _nine_in_ten(machines: Sequence[Sequence[float]]) -> float:
    weighed = sorted((residual, 1.0 / len(some) / len(machines)) for some in machines for residual in some)
    shares = np.cumsum([weight for _, weight in weighed])
    return weighed[min(int(np.searchsorted(shares, 0.9)), len(weighed) - 1)][0]


# --- tables


def report(rows: Sequence[Row], known: Fitted, without: Mapping[str, Mapping[str, Terms]]) -> str:
    """The errors by machine, of rows held out and of those fitted."""
    alone = {name: replace(known, terms=terms) for name, terms in without.items()}
    held = [row for row in rows if not is_fitted(row)]
    told = (
        f"{sum(map(is_fitted, rows)):,} published rows fitted, {len(held):,} of machines and cases that were not. "
        "Errors are absolute, of a forecast by the link's datasheet alone, over the published time; the interval is "
        "that of 90%. Below 1 MiB a collective takes its latency; those of h200 and of the other hosts of A100s are "
        "there the host's, which launches from Python. The pair's sends read up to 314 GB/s on a "
        "link of 300, so that they were not timed to their end; l40s copies between more than two GPUs at 2 to 6 GB/s. "
        "Neither is dropped. SimAI's shares of the line rate are taken as those of hosts of eight H100s, 400 Gbit/s "
        "each: neither GPU nor collective is told. `python -m studies.links TABLES`."
    )
    parts = ["# The law of collectives", "", told]
    for size, is_wanted in (("From 1 MiB on", True), ("Below 1 MiB", False)):
        some = [row for row in rows if (row.asked.bytes >= LARGE) is is_wanted]
        fit = [row for row in some if is_fitted(row)]
        others = _table([row for row in fit if row.machine in alone], lambda row: alone[row.machine])
        never = _table([row for row in some if not is_fitted(row)], lambda row: known)
        parts += ["", f"## {size}", "", "Held out: the machine, by terms of the others alone", "", others]
        parts += ["", "Held out: never fitted", "", never, "", "Fitted", "", _table(fit, lambda row: known)]
    head = ["regime", "base", "hop", "share", "copied", "growth µs", "crowded"]
    shown = [
        [key, *(f"{value:.3g}" for value in (t.base, t.hop, t.share, t.copied, t.growth * 1e6, t.crowded))]
        for key, t in known.terms.items()
    ]
    sigmas = [[name, f"{value:.3f}", f"{math.expm1(Z_90 * value):.0%}"] for name, value in known.sigma.items()]
    return "\n".join([
        *parts, "", "## Terms, times NCCL's own figures", "", table(head, shown), "", "## Deviations of log seconds",
        "", table(["class", "deviation", "upper end"], sigmas),
    ])  # fmt: skip


def _table(rows: Sequence[Row], by: Callable[[Row], Fitted]) -> str:
    groups: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        regime = "NVLS" if is_nvls(row) else "sums of bytes" if row.dtype == SUMS_OF_BYTES else ""
        regime = "send" if row.asked.kind == "send_recv" else regime
        group = row.asked.group
        groups[row.machine, group.link.name, group.gpus, regime].append(row)
    head = ["machine", "link", "GPUs", "", "rows", "median", "90%", "worst", "in the interval"]
    lines = [
        [machine, link, str(gpus), regime, *_errors(some, by)] for (machine, link, gpus, regime), some in groups.items()
    ]
    return table(head, [*lines, ["all", "", "", "", *_errors(rows, by)]])


def _errors(rows: Sequence[Row], by: Callable[[Row], Fitted]) -> list[str]:
    if not rows:
        return ["0", *["-"] * 4]
    found = [(projected(row.asked, by(row)), row.seconds) for row in rows]
    errors = [abs(time.seconds / real - 1.0) for time, real in found]
    inside = sum(time.low <= real <= time.high for time, real in found)
    shown = [f"{value:.1%}" for value in (median(errors), float(np.quantile(errors, 0.9)), max(errors))]
    return [str(len(rows)), *shown, f"{inside / len(rows):.0%}"]


if __name__ == "__main__":
    main()
