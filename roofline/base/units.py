"""Numbers in words, with their units: ms, TFLOP/s and $ per million tokens appear on the screen only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopcast.roofline.base.numbers import Number


NONE = "-"


def ms(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def percent(error: float | None) -> str:
    """+1.5%; 0.0% has no sign"""
    return NONE if error is None else f"{error * 100:+.1f}%" if abs(error) >= 0.0005 else "0.0%"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value * 100:.1f}%"


def rate(flops_per_second: float) -> str:
    return (
        f"{flops_per_second / 1e12:,.1f} TFLOP/s"
        if flops_per_second >= 1e12
        else f"{flops_per_second / 1e9:,.1f} GFLOP/s"
    )


def gigabytes(count: float | None) -> str:
    return NONE if count is None else f"{count / 1e9:.2f} GB" if count < 1e10 else f"{count / 1e9:.1f} GB"


def parameters(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def numbers(found: Mapping[str, Number]) -> dict[str, Any]:
    return {name: asdict(number) for name, number in found.items()}


def short(gpu: str) -> str:
    """nvidia-a100-80gb-pcie -> a100-80gb-pcie: a column's worth."""
    return gpu.removeprefix("nvidia-")
