"""Formats numbers with units, for the terminal, the figures and the pages alike.

Everything else in flopcast is in SI units: ms, TFLOP/s and GB appear only in text for readers and are produced here.
Two functions for one quantity differ on purpose: in the columns of a page the unit stands in the heading and decimals
line up; in a sentence or a terminal's cell the number carries its unit and as few digits as it needs.
"""

from __future__ import annotations

from decimal import Decimal

NONE = "-"  # a number that is not known; pages, which need no ASCII, show an en dash


def ms(seconds: float | None) -> str:
    """Milliseconds without the unit: 0.01234 -> "12.34", 2.4e-6 -> "0.0024", 1.5 -> "1,500.0", None -> "-"."""
    if seconds is None:
        return NONE
    if 0 < seconds < 1e-4:
        return in_full(seconds * 1e3)
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def ms_in_column(seconds: float) -> str:
    """As `ms`, with two decimals throughout so that a column's decimal points line up, and three below 1 ms."""
    return f"{seconds * 1e3:.3f}" if seconds < 1e-3 else f"{seconds * 1e3:,.2f}"


def duration(seconds: float) -> str:
    """Three digits in the unit that fits: 2e-5 -> "20 µs", 0.5 -> "500 ms", 1234 -> "1,234 s"."""
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    return f"{seconds * 1e6:.3g} µs" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def percent(change: float | None) -> str:
    """A change or an error, signed: 0.015 -> "+1.5%", -0.0001 -> "0.0%", None -> "-"."""
    return NONE if change is None else f"{change:+,.1%}" if abs(change) >= 0.0005 else "0.0%"


def share(part: float | None) -> str:
    """A part of a whole, or an error without its sign: 0.423 -> "42.3%", None -> "-"."""
    return NONE if part is None else f"{part:,.1%}"


def utilisation(part: float | None) -> str:
    """An MFU, which may be tiny: 0.423 -> "42.3%", 0.000123 -> "0.012%", None -> "-"."""
    return share(part) if part is None or not 0 < part < 0.0005 else f"{in_full(part * 100, 2)}%"


def integer(value: float) -> str:
    """1234.5 -> "1,234"."""
    return f"{value:,.0f}"


def three_digits(value: float) -> str:
    """Three significant digits, thousands in full: "0.0000577", "0.017", "60.6", "1,440"."""
    return f"{value:,.0f}" if value >= 100 else in_full(value)


def in_full(value: float, digits: int = 3) -> str:
    """So many significant digits, without an exponent down to 1e-7, as a price or a rate is read: "0.0000577"."""
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):f}" if 1e-7 <= abs(value) < 1e-4 else text


def three_in_column(value: float) -> str:
    """As `three_digits`, with trailing zeros, so that a column's decimal points line up: "0.0170", "92.0", "131"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def count(value: float) -> str:
    """A number of parameters or tokens in three digits: 613182976 -> "613M"."""
    if value >= 0.9995e9:  # three digits would show it as 1000M
        return f"{value / 1e9:.3g}B"
    return f"{value / 1e6:.3g}M" if value >= 0.9995e6 else f"{value / 1e3:.3g}k"


def parameters(value: float) -> str:
    """A model's parameters where one model is the subject: 613182976 -> "613.2 M", 4200 -> "4.2 k"."""
    if value >= 1e9:
        return f"{value / 1e9:.2f} B"
    return f"{value / 1e6:.1f} M" if value >= 1e5 else f"{value / 1e3:.1f} k" if value >= 1e3 else f"{value:.0f}"


def scale(most: float, unit: str) -> tuple[float, str]:
    """The divisor of a rate, or of an axis up to `most`, and its unit: 2e13, "FLOP/s" -> (1e12, "TFLOP/s")."""
    return (1e12, f"T{unit}") if most >= 1e12 else (1e9, f"G{unit}")


def rate(value: float, unit: str, decimals: int | None = None) -> str:
    """A rate in three digits, or with so many `decimals`: 7.9e14, "FLOP/s" -> "790 TFLOP/s", with 1 "790.0 TFLOP/s"."""
    by, name = scale(value, unit)
    return f"{three_digits(value / by) if decimals is None else f'{value / by:,.{decimals}f}'} {name}"


def byte_size(size: float) -> str:
    """Three digits in the unit that fits, by powers of ten: 1e6 -> "1 MB"."""
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 0.9995 * 10**power:  # three digits would show it as 1000 of the smaller unit
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.3g} B"


def gb_in_column(size: float) -> str:
    """1.234e9 -> "1.23", 1.234e10 -> "12.3"."""
    return f"{size / 1e9:.2f}" if size < 1e10 else f"{size / 1e9:.1f}"


def gigabytes(size: float | None) -> str:
    """Memory to compare with a GPU's, always in GB: 1.234e9 -> "1.23 GB", None -> "-"."""
    return NONE if size is None else f"{gb_in_column(size)} GB"


def short_name(gpu: str) -> str:
    """A GPU's name without its maker, for a column: "nvidia-a100-80gb-pcie" -> "a100-80gb-pcie"."""
    return gpu.removeprefix("nvidia-")
