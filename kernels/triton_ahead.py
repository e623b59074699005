# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Programmatic dependent launch for the memory-bound kernels, where the part has it. Imports triton: import lazily.

A kernel launched so is put on the multiprocessors as the programs of the kernel before leave, once all of those have
let it (`gdc_launch_dependents`) or ended, and waits there (`gdc_wait`) for that kernel's end. The order on a stream
stays what it was under two rules that every kernel here keeps:

- Every program waits before its first access of memory, reading or writing. Then nothing is read before it is written,
  and a buffer that the allocator gives out again is not written while the kernel before reads what was in it.
- The next is let in after that wait, never before. So when the next one's programs run, all but this kernel has ended:
  even one that reads, ahead of its own wait, what this kernel does not write finds it written.

`gdc_wait` returns when the kernel before has ended and its writes are seen, wherever in it the next was let in.
Captured in a graph the edges between such kernels are programmatic too, and mean the same. A kernel launched otherwise,
a copy or an event waits for the whole end, as ever.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from flopcast.kernels.rowwise import capability
from flopcast.kernels.triton_common import interpreted


@lru_cache
def launched_ahead(device: torch.device) -> dict[str, bool]:
    """The launch options on `device`; empty where a kernel starts only after the one before has ended.

    That is so on parts other than sm_90, in the interpreter and with FLOPCAST_PDL=0 (read once). The kernel's constant
    AHEAD says whether there are any options.
    """
    ahead = capability(device)[0] == 9 and not interpreted() and os.environ.get("FLOPCAST_PDL", "1") == "1"
    return {"launch_pdl": True} if ahead else {}
