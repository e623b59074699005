"""Prints the output of `flopcast gpus`, known profiles and hosts with their basis, and the host that `fit` found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE
from flopcast.roofline.gpu.profile.host import PHASES, HostCosts, machines_of
from flopcast.roofline.views.terminal.console import print_table

if TYPE_CHECKING:
    from flopcast.roofline.gpu.library.profiles import Known, KnownHost


def print_known(found: Sequence[Known]) -> None:
    """Prints one row per profile."""
    rows = [[entry.name, entry.basis, entry.source] for entry in found]
    print_table("Known GPUs", ("--gpu", "basis", "source"), rows)


def print_hosts(found: Sequence[KnownHost]) -> None:
    """Prints one row per host: ms per layer by phase, machines, deviation and day. Prints nothing without hosts."""
    if not found:
        return
    rows = []
    for entry in found:
        host = entry.costs
        layers = [f"{host.layers[phase]['seconds'] * 1e3:.3f}" if phase in host.layers else NONE for phase in PHASES]
        rows.append([entry.name, *layers, machines_of(host), f"{host.sigma:.0%}", host.date or NONE, entry.source])
    columns = ("--host", "forward", "backward", "optimizer", "machines", "deviation", "day", "source")
    caption = (
        "machines: how many of this CPU model were measured, with their ms per layer of a whole step; the host is "
        "their mean, and yours may be any of them: `flopcast bench --suite host` measures it in a minute"
    )
    print_table("Known hosts, ms per layer of Qwen3 in eager mode", columns, rows, caption)


def print_host(host: HostCosts) -> None:
    """Prints one row per phase: its cost per layer and per launch."""
    depths = ", ".join(map(str, host.layers.get("depths", ())))
    title = f"Host {host.name}: {host.layers.get('model', 'no model')}, eager" + (f", depths {depths}" * bool(depths))
    caption = f"single runs differ by {host.sigma:.0%} (standard deviation); {host.basis}, {host.date or 'no date'}"
    columns = ("phase", "ms per layer", "over rounds", "between depths", "once per step, ms", "us per launch")
    print_table(title, columns, layer_rows(host), caption)


def layer_rows(host: HostCosts) -> list[list[str]]:
    """Cells with the cost of each phase per layer, with its spread, and per launch."""
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
