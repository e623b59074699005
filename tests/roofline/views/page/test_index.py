"""The index over pages, and the parts of a page that other modules make."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.dollars import standard
from flopcast.roofline.dollars.standard import MODELS, standard_gpu
from flopcast.roofline.gpu.catalogue.prices import latest, load_prices
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.views.figures.width_checks import read_checks
from flopcast.roofline.views.page import index as page_index
from flopcast.roofline.views.page import standard as page_standard
from flopcast.roofline.views.page import widths
from flopcast.roofline.views.page.extra import extra_sections
from flopcast.roofline.views.page.widths import multiple_to_keep
from flopcast.roofline.widths.measured_rules import measured_rules


def page(folder: Path, gpu: str, basis: str = "measured") -> None:
    folder.mkdir(parents=True)
    numbers = [{"value": "1 TFLOP/s", "what": "products <fast>", "note": ""}]
    record = {"gpu": gpu, "name": gpu.upper(), "basis": basis, "date": "2026-11-21", "torch": "2", "numbers": numbers,
              "page": "report.html"}  # fmt: skip
    (folder / "report.json").write_text(json.dumps(record))
    (folder / "report.html").write_text("<p>a page")


def test_the_index_lists_pages_and_not_this_machines_own(tmp_path: Path) -> None:
    page(tmp_path / "b", "gpu-b", "projected")
    page(tmp_path / "c", "gpu-c")
    page(tmp_path / "local", "gpu-local")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "report.json").write_text('{"gpu": ')
    (tmp_path / "c" / "validation.csv").write_text("name\n")
    (tmp_path / "c" / "README.md").write_text("of the page's folder")
    record = json.loads((tmp_path / "c" / "report.json").read_text())
    record["summary"] = [["Which multiple to keep", "64 & no other"]]
    del record["torch"]  # what a page need not say
    (tmp_path / "c" / "report.json").write_text(json.dumps(record))
    (tmp_path / "economics").mkdir()
    (tmp_path / "economics" / "README.md").write_text("# Prices")
    text = page_index.write(tmp_path).read_text()
    assert "64 &amp; no other" in text
    assert 'href="economics/README.md"' in text
    assert 'href="c/README.md"' not in text
    assert text.index("GPU-C") < text.index("GPU-B")  # measured first
    assert "gpu-local" not in text.lower()
    assert 'href="c/report.html"' in text
    assert 'href="c/validation.csv"' in text
    assert 'href="b/validation.csv"' not in text
    assert "products &lt;fast&gt;" in text


def test_an_index_is_kept_up_to_date_and_none_is_made_unasked(tmp_path: Path) -> None:
    page(tmp_path / "a", "gpu-a")
    index = tmp_path / page_index.INDEX
    assert page_index.keep(tmp_path / "a") is None
    index.write_text("<html>somebody's own")
    assert page_index.keep(tmp_path / "a") is None
    assert "somebody" in index.read_text()
    assert page_index.keep(tmp_path / "a", tmp_path) == index
    page(tmp_path / "b", "gpu-b")
    assert page_index.keep(tmp_path / "b") is not None
    assert "GPU-B" in index.read_text()
    before = index.read_text()
    page(tmp_path / "local", "gpu-local")
    assert page_index.keep(tmp_path / "local") is None
    assert index.read_text() == before
    with pytest.raises(UsageError, match="--index"):
        page_index.keep(tmp_path / "a", tmp_path / "nowhere")


def test_the_index_begins_with_what_standard_models_cost_on_each_gpu(
    tmp_path: Path, h200: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models: the one between them would be a column like theirs, and take five seconds to forecast."""
    models = MODELS[0], MODELS[-1]
    for each in (standard, page_standard):
        monkeypatch.setattr(each, "MODELS", models)
    page(tmp_path / "nvidia-h200", "nvidia-h200")
    price = latest(load_prices(), "nvidia-h200")
    gpus = [standard_gpu(h200, price), standard_gpu(find_profile("nvidia-l4"), None)]
    text = page_index.write(tmp_path, gpus).read_text()
    table = text[text.index('id="table-gpus"') : text.index("</table>")]
    rows = [re.findall(r'data-v="([^"]*)"', row) for row in table.split("<tr>")[2:]]
    keys = re.findall(r'data-key="([^"]*)"', table)
    on_h200, on_l4 = (dict(zip(keys, row, strict=True)) for row in rows)
    assert text.index('id="table-gpus"') < text.index("<article")
    assert '<a href="nvidia-h200/report.html">nvidia-h200</a>' in table
    assert table.count("<a href") == 1  # the L4 has no page here
    for model in models:
        step = gpus[0].step_of(model)
        low, value, high = (float(on_h200[f"{model}/step_seconds{end}"]) for end in ("_low", "", "_high"))
        assert low < value < high
        assert value == pytest.approx(step.forecast.step_seconds, rel=1e-5)
        usd = price.usd_per_hour / 3600 * value / 8192 * 1e6 if price else 0.0
        assert float(on_h200[f"{model}/usd_per_mtoken"]) == pytest.approx(usd, rel=1e-4)
    assert price is not None
    assert on_h200["price_date"] == price.date.isoformat()
    assert on_l4["qwen3-0.6b/step_seconds"]
    assert on_l4["qwen3-0.6b/usd_per_mtoken"] == ""  # no price was given
    assert on_l4["qwen3-4b/step_seconds"] == ""  # 64 GB of weights and states do not fit into 24


def test_the_multiple_to_keep_comes_from_this_gpus_own_products(h200: Profile) -> None:
    rules = measured_rules(h200)
    said = multiple_to_keep(rules)
    assert said.startswith("Keep hidden, ffn and vocabulary sizes to multiples of 64.")
    assert "those with an odd size take" in said
    assert "times as long; with a size divisible by 2 or 4 alone" in said
    assert "real steps say so. Of" in multiple_to_keep(rules, steps="As real steps say so.")
    assert multiple_to_keep([]) == ""


def test_checks_of_widths_are_told_by_set_and_kind() -> None:
    """The committed tables of all sets: counts of the summary from the rows again, and what steps lost in words."""
    folder = Path(__file__).resolve().parents[4] / "reports/nvidia-h200"
    checks = read_checks(folder)
    said = widths.check_summary(checks.sizes)
    assert said is not None
    counts = {(row.set, row.kind): row for row in said.rows}
    assert [row.set for row in said.rows if row.kind == "all"] == ["3", "2", "1"]  # the newest first
    for name, table_of in (("1", "widths.csv"), ("2", "widths-2.csv"), ("3", "widths-3.csv")):
        with (folder / table_of).open(newline="", encoding="utf-8") as file:
            errors = [float(row["penalty_error"]) for row in csv.DictReader(file) if row["penalty_error"]]
        assert counts[name, "all"].number == len(errors) >= 32
        assert counts[name, "all"].near == sum(abs(error) <= 0.015 for error in errors)
        kinds = [counts[name, kind].number for kind in ("odd sizes", "multiples of 2 or 4", "multiples of 8 to 32")]
        assert sum(kinds) == len(errors)
    table = widths.check_table(checks.sizes)
    assert table is not None
    assert "before any of its steps ran" in table.note
    shapes = widths.shape_table(checks.shapes)
    assert shapes is not None
    assert {row.rank_measured for row in shapes.rows} == {1, 2, 3, 4, 5, 6}
    lost = widths.what_steps_lost(checks.sizes)
    assert lost.startswith("Real training steps of 133 unaligned sizes took longer: odd sizes by 54% to ")
    assert widths.check_summary([]) is widths.check_table([]) is widths.shape_table([]) is None
    assert widths.what_steps_lost([]) == ""


def test_extra_sections_are_there_or_say_why(tmp_path: Path, h200: Profile) -> None:
    out = tmp_path / "nvidia-h200"
    out.mkdir()
    sections, faults = extra_sections(h200, out, may_trace=False)
    assert [part.name for part in sections] == ["widths"]
    assert sections[0].advice[0] == "Which multiple to keep"
    assert faults == []
    economics = tmp_path / "economics"
    economics.mkdir()
    for document in ("{}", '{"claims": [{"depth_law": "printed", "hosts": "own"}]}', "[" * 10**5, "torn"):
        (economics / "claims.json").write_text(document)
        sections, faults = extra_sections(h200, out, may_trace=False)
        assert [part.name for part in sections] == ["widths"]
        assert "claims could not be made: DataError: " in faults[0]
