"""Hosts and the spread of cards, as the terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcast.roofline.gpu.fit import cards
from flopcast.roofline.gpu.profile.host import PHASES, HostCosts, machines_of
from flopcast.roofline.views.terminal import console, hosts


def print_spread(spread: dict[str, Any]) -> None:
    title = f"{len(spread['cards'])} cards, row by row"
    console.console().print(console.table(title, cards.TABLE_COLUMNS, cards.table_rows(spread)))


def print_host(host: HostCosts) -> None:
    depths = ", ".join(map(str, host.layers.get("depths", ())))
    title = f"Host {host.name}: {host.layers.get('model', 'no model')}, eager" + (f", depths {depths}" * bool(depths))
    caption = f"single runs differ by {host.sigma:.0%} (standard deviation); {host.basis}, {host.date or 'no date'}"
    console.console().print(console.table(title, hosts.LAYER_COLUMNS, hosts.layer_rows(host), caption))


def print_hosts(found: Sequence[Any]) -> None:
    if not found:
        return
    rows = [[entry.name, *hosts.summary(entry.costs), entry.source] for entry in found]
    columns = ("--host", "forward", "backward", "optimizer", "machines", "deviation", "day", "source")
    caption = (
        "machines: how many of this CPU model were measured, with their ms a layer of a whole step; the host is their "
        "mean, and yours may be any of them: `flopcast bench --suite host` measures it in half a minute"
    )
    title = "Known hosts, ms a layer of Qwen3 in eager mode"
    console.console().print(console.table(title, columns, rows, caption))


# --- for the terminal

LAYER_COLUMNS = ("phase", "ms a layer", "over rounds", "between depths", "once a step, ms", "us a launch")


def layer_rows(host: HostCosts) -> list[list[str]]:
    """Cells: what each phase costs by layer, with its spread, and by launch."""
    rows = []
    for phase in (*PHASES, "step"):
        layer = host.layers.get(phase)
        launch = "" if phase == "step" else f"{getattr(host, phase).get('launch', 0.0) * 1e6:.1f}"
        if layer is None:
            rows.append([phase, "", "", "", "", launch])
            continue
        between = ", ".join(f"{name}: {value * 1e3:.3f}" for name, value in layer.get("between", {}).items())
        spread = f"{layer['low'] * 1e3:.3f} to {layer['high'] * 1e3:.3f}"
        rows.append([phase, f"{layer['seconds'] * 1e3:.3f}", spread, between, f"{layer['fixed'] * 1e3:.2f}", launch])
    return rows


def summary(host: HostCosts) -> list[str]:
    """Cells of one line: ms a layer of forward, backward and optimizer, machines, deviation, day."""
    layers = [f"{host.layers[phase]['seconds'] * 1e3:.3f}" if phase in host.layers else "-" for phase in PHASES]
    return [*layers, machines_of(host), f"{host.sigma:.0%}", host.date or "-"]
