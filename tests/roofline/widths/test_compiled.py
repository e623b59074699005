"""Widths of compiled steps: few sizes, what inductor pads, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library.compiled import as_eager
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config, make_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.views.terminal.widths import print_answer
from flopcast.roofline.widths import answer, penalties
from flopcast.roofline.widths.answer import Answer
from flopcast.roofline.widths.padding import padded_products

MODEL = make_config(width=1024, depth=4, heads=8, kv_heads=4, ffn=3072, vocab=32_768)
RUN = Run(batch=8, seq=1024, optimizer="adamw-fused", mode="compile")


def padded(config: Config, traced: Traced, **how: Any) -> Stream:
    """The eager step; of a compiled one as if all were padded to multiples of 8."""
    if traced.mode == "eager":
        return get_stream(config, traced, **how)
    wide = {**config, **{name: -(-int(config[name]) // 8) * 8 for name in ("hidden_size", "intermediate_size")}}
    return get_stream(wide, as_eager(traced), **how)


@pytest.fixture
def found(h200: Profile, monkeypatch: pytest.MonkeyPatch) -> Answer:
    compiled: list[Config] = []

    def compile_ahead(wanted: Iterable[tuple[Config, Traced]], progress: Any) -> None:
        compiled.extend(config for config, _ in wanted)

    monkeypatch.setattr(penalties, "get_stream", padded)
    monkeypatch.setattr(answer, "compile_ahead", compile_ahead)
    made = answer.answer(MODEL, RUN, h200, axes=("hidden", "ffn"), with_shapes=False)
    assert len(compiled) <= 2 * 9 + 1
    assert {config["hidden_size"] for config in compiled} == {point.value for point in made.points["hidden"]}
    return made


def test_sizes_that_are_padded_are_told_with_what_they_cost(found: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    by_value = {point.value: point for point in found.points["hidden"]}
    assert sorted(by_value) == [960, 992, 1020, 1023, 1024, 1032, 1040, 1088]
    assert {value for value, point in by_value.items() if point.padded} == {1020, 1023}
    assert all(0 < point.padded <= point.products for value, point in by_value.items() if value in (1020, 1023))
    (one,) = (p for p in found.penalties["hidden"] if p.value == 1023)
    assert sum(one.parts.values()) == pytest.approx(one.device)
    assert abs(one.device) < 0.05  # where an eager step's odd width costs several times as much
    words = found.padding_words() or ""
    assert words.startswith("inductor pads products")
    for part in ("hidden size 1,020, 1,023: ", "ffn size 3,068, 3,071: ", "of kernel time"):
        assert part in words
    print_answer(found)
    shown = capsys.readouterr().out
    assert "mode compile" in shown
    assert "Products by layout" not in shown
    assert "Measured products" not in shown


def test_the_table_and_the_document_have_what_is_padded(found: Answer, tmp_path: Path) -> None:
    rows = {row["value"]: row for row in found.csv_rows() if row["axis"] == "hidden"}
    assert set(rows[1023]) <= set(found.columns)
    assert rows[1023]["padded_products"] > 0 == rows[1032]["padded_products"]
    assert {"penalty_products", "penalty_passes", "penalty_rest"} <= set(rows[1023])
    document = found.to_json()
    assert document["padding"]["says"] == found.padding_words()
    assert document["run"]["mode"] == "compile"
    assert all("parts" in one for one in document["penalties"])


def test_padding_is_read_off_the_products() -> None:
    def of(width: int) -> Stream:
        return get_stream({**MODEL, "hidden_size": width}, as_eager(RUN.traced_on("cuda 9.0 132")), vary="width")

    count, products = padded_products(of(1024), of(1023))
    assert 0 < count < products  # those of the rotary angles, and of attention, have no hidden size
    assert padded_products(of(1024), of(1024)) == (0, products)
    assert padded_products(of(1032), of(1023)) == (0, products)  # no padding: another model


def test_a_forward_alone_is_refused(h200: Profile) -> None:
    with pytest.raises(UsageError, match="--forward-only with mode 'compile'"):
        answer.answer(MODEL, RUN, h200, forward=True)
