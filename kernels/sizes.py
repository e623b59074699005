"""Whole-number sizes of launches. Triton has functions of the same names, which cost the host 4 us a call (triton 3.6:
they are for kernels too, and look at every argument); a division costs nothing."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n from 1."""
    return 1 << max(0, n - 1).bit_length()
