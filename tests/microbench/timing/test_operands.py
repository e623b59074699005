"""Operand sets: how many, and that copies lie in memory as their originals."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.microbench.timing.operands import clone_operands, rotation_sets, storage_bytes
from flopcast.microbench.timing.policy import TimingPolicy


@given(footprint=st.integers(0, 1 << 34), cache=st.integers(1 << 20, 1 << 28), free=st.integers(0, 1 << 37))
def test_rotation_outgrows_the_cache_within_the_memory_allowed(footprint: int, cache: int, free: int) -> None:
    policy = TimingPolicy()
    sets = rotation_sets(footprint, cache, free, policy)
    assert 1 <= sets <= policy.max_sets
    if sets > 1:
        assert sets * footprint <= min(policy.max_rotation_bytes, free / 2)
    if 1 < sets < policy.max_sets and (sets + 1) * footprint <= min(policy.max_rotation_bytes, free / 2):
        assert sets == 2 or sets * footprint >= policy.rotation_factor * cache


def test_clones_lie_in_memory_as_their_originals() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    bias = torch.randn(6).expand(4, 6)
    leaf = torch.randn(3, requires_grad=True)
    originals = (base.T, base[1:, 2:], bias, leaf, torch.tensor(3))
    clones = clone_operands(originals)
    for original, clone in zip(originals, clones, strict=True):
        assert torch.equal(original, clone)
        assert original.stride() == clone.stride()
        assert original.storage_offset() == clone.storage_offset()
        assert original.data_ptr() != clone.data_ptr()
        assert original.requires_grad == clone.requires_grad
    clones[0].zero_()  # a view of the same storage sees it, the original does not
    assert not clones[1].any()
    assert base.any()


def test_footprint_counts_a_shared_storage_once() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base[10:], {"x": (torch.zeros(5),)}, 3, None]) == 400 + 20
