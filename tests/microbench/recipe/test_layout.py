"""Layouts: what they are read from, how many ranks they have, and which sizes they divide."""

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import Layout


@pytest.mark.parametrize(
    ("text", "world"),
    [("ddp=8", 8), ("zero1=8", 8), ("zero2=8", 8), ("fsdp=8", 8), ("hsdp=2x4", 8), ("tp=2", 2), ("tp=2,fsdp=4", 8),
     ("pp=2", 2), ("pp=2:gpipe", 2), ("ep=8", 8), ("cp=2", 2), ("tp=2,cp=2,hsdp=2x4,pp=4:gpipe", 128)],
)  # fmt: skip
def test_a_layout_is_written_as_it_is_read(text: str, world: int) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert layout.world == world


def test_parts_may_stand_in_any_order() -> None:
    assert Layout.parse("fsdp=4, tp=2") == Layout.parse("tp=2,fsdp=4")


def test_the_hybrid_has_replicas_of_shards() -> None:
    layout = Layout.parse("hsdp=2x4")
    assert (layout.replicas, layout.shards, layout.data) == (2, 4, 8)


def test_only_the_stages_of_a_pipeline_differ() -> None:
    assert Layout.parse("fsdp=1024").distinct_ranks == (0,)
    assert Layout.parse("tp=2,fsdp=4,pp=4").distinct_ranks == (0, 8, 16, 24)


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "valid are ddp=8"), ("fsdp", "no part"), ("dp=8", "no part"), ("fsdp=0", "a number of ranks"),
     ("fsdp=-1", "a number of ranks"), ("fsdp=2x2", "a number of ranks"), ("hsdp=4", "hsdp=2x4"),
     ("fsdp=2,ddp=2", "a second part"), ("tp=2,tp=2", "a second part"), ("pp=2:zb", "valid are 1f1b, gpipe"),
     ("fsdp=99999999999999999999", "at most"), ("hsdp=2000x2000", "at most"), ("fsdp=1048576,tp=2", "at most"),
     ("tp=2,ddp=2", "valid beside tp"), ("fsdp=²", "a number of ranks")],
)  # fmt: skip
def test_what_is_no_layout_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Layout.parse(text)


def test_sizes_must_divide() -> None:
    Layout.parse("tp=2,fsdp=3").check(layers=28, heads=16, kv_heads=8, ffn=3072)
    with pytest.raises(UsageError, match=r"tp=3 does not divide heads 16 and kv_heads 8.*valid are 1, 2, 4, 8$"):
        Layout.parse("tp=3").check(heads=16, kv_heads=8)
    with pytest.raises(UsageError, match="pp=3 does not divide layers 28: valid are 1, 2, 4, 7, 14, 28"):
        Layout.parse("pp=3").check(layers=28, accumulate=4)
    with pytest.raises(UsageError, match="no experts"):
        Layout.parse("ep=2").check(layers=28)
    with pytest.raises(UsageError, match="ep=3 does not divide experts 8: valid are 1, 2, 4, 8"):
        Layout.parse("ep=3").check(experts=8)
    with pytest.raises(UsageError, match="cp=3 does not divide half of seq 128"):
        Layout.parse("cp=3").check(seq=256)


def test_a_pipeline_needs_micro_batches() -> None:
    Layout.parse("pp=2").check(layers=28, accumulate=2)
    Layout.parse("pp=2:gpipe").check(layers=28)
    with pytest.raises(UsageError, match="valid are accumulate 4 and above, or pp=4:gpipe"):
        Layout.parse("pp=4").check(layers=28, accumulate=2)
