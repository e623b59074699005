"""Measures the mean clock of a GPU's multiprocessors between two points of a stream of kernels.

NVML tells the clock of a moment, and while a power limit moves it that is the clock of no kernel. Each multiprocessor
counts its cycles, and all read one timer of nanoseconds: between two readings of both on the same multiprocessor the
cycles per nanosecond are the mean clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

_BLOCKS_PER_MULTIPROCESSOR = 4  # of one warp: so many reach all but a few


class ClockProbe:
    """`mark` it before and after some kernels; the device's mean clock between the two is `mean_mhz`. Raises
    ImportError where there is no Triton."""

    def __init__(self, device: torch.device) -> None:
        from flopcast.kernels.triton_clock import read_clocks_kernel

        self._kernel = read_clocks_kernel
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = _BLOCKS_PER_MULTIPROCESSOR * count
        self._device = device
        self._marks: list[torch.Tensor] = []
        self._buffers = [torch.zeros(self._blocks, 3, dtype=torch.int64, device=device) for _ in range(2)]
        self.mark()  # compiles it
        self._marks.clear()

    def mark(self) -> None:
        """Reads the clocks once the kernels before it on the current stream are done. The third mark is a first one."""
        if len(self._marks) == 2:
            self._marks.clear()
        buffer = self._buffers[len(self._marks)]
        with torch.cuda.device(self._device):
            self._kernel[(self._blocks,)](buffer, num_warps=1)
        self._marks.append(buffer)

    def mean_mhz(self) -> float | None:
        """Waits for the device. None where no multiprocessor ran a block of both marks, or there were not two."""
        if len(self._marks) < 2:
            return None
        before, after = (buffer.tolist() for buffer in self._marks)
        return mean_mhz(before, after)


def mean_mhz(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> float | None:
    """Returns the median over multiprocessors of their mean clock in MHz, from rows of (multiprocessor, cycles,
    nanoseconds) read at two times; None where no multiprocessor is in both."""
    first = {number: (cycles, now) for number, cycles, now in before}
    found = [
        1e3 * (cycles - first[number][0]) / (now - first[number][1])
        for number, cycles, now in after
        if number in first and now > first[number][1]
    ]
    return median(found) if found else None
