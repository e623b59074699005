import json
import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcast.errors import DataError, UsageError
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.catalogue.prices import (
    ARTICLE_DATE,
    DEFAULT_PROVIDER,
    PRICES_FILE,
    Price,
    advice,
    find_price,
    latest,
    load_prices,
    newest,
    parse_override,
    unranked,
    with_overrides,
    write_prices,
)

HEADER = "gpu,provider,kind,usd_per_hour,date,date_inferred,source\n"
GOOD = "nvidia-l4,Me,on-demand,0.5,2025-01-02,false,invoice\n"
TODAY = date(2026, 11, 21)


def book(tmp_path: Path, text: str, name: str = "prices.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# --- the shipped book


def test_the_shipped_book_has_the_prices_of_the_article() -> None:
    prices = load_prices()
    wanted = {"nvidia-l4": 0.39, "nvidia-a100-80gb-pcie": 1.64, "nvidia-h100-sxm": 2.69, "nvidia-h200": 3.59}
    for gpu, usd in wanted.items():
        price = latest(prices, gpu, on=ARTICLE_DATE)
        assert price is not None
        assert (price.usd_per_hour, price.provider, price.kind) == (usd, DEFAULT_PROVIDER, "on-demand")
        assert price.date_inferred
        assert "2025-Q4" in price.source


def usd(prices: list[Price], gpu: str, **asked: Any) -> float | None:
    found = latest(prices, gpu, **asked)
    return found and found.usd_per_hour


def test_the_newest_row_is_the_default() -> None:
    prices = load_prices()
    newest = {"nvidia-l4": 0.49, "nvidia-a100-80gb-pcie": 1.79, "nvidia-h100-sxm": 3.99, "nvidia-h200": 4.59}
    assert {gpu: usd(prices, gpu) for gpu in newest} == newest
    h100 = latest(prices, "nvidia-h100-sxm")
    assert h100 is not None
    assert h100.date == date(2026, 11, 9)
    assert usd(prices, "nvidia-b200", provider="Lambda") == 6.69
    assert usd(prices, "nvidia-h100-sxm", kind="spot", on=ARTICLE_DATE) == 1.75


@pytest.mark.parametrize(
    ("on", "age", "says", "why"),
    [
        (date(2025, 6, 15), 0, False, None),
        (date(2025, 12, 12), 180, False, None),
        (date(2025, 12, 13), 181, True, None),
        (date(2026, 6, 15), 365, True, None),
        (date(2026, 6, 16), 366, True, "its price is 366 days old"),
    ],
)
def test_an_old_price_says_its_age_and_a_year_old_one_ranks_nothing(
    on: date, age: int, says: bool, why: str | None
) -> None:
    price = latest(load_prices(), "nvidia-l40s", on=on)
    assert price is not None
    assert (price.age_days, price.to_json()["age_days"], price.to_row()["age_days"]) == (age, age, age)
    assert json.loads(json.dumps(price.to_row()))["date"] == "2025-06-15"
    assert price.label == "$0.86/h RunPod Secure Cloud on-demand, about 2025-06-15" + says * f", {age} days old"
    assert unranked(price) == why


def test_the_age_is_counted_from_today_where_no_day_is_asked_for() -> None:
    l40s = latest(load_prices(), "nvidia-l40s")
    assert l40s is not None
    assert (date.today() - date(2025, 6, 15)).days - l40s.age_days in (0, 1)
    given = latest([parse_override("nvidia-l40s=0.5", today=date(2020, 1, 1))], "nvidia-l40s", on=TODAY)
    assert given is not None
    assert (given.age_days, unranked(given), unranked(None)) == (0, None, "no price")


def test_the_shipped_book_keeps_its_own_rules() -> None:
    prices = load_prices()
    assert all(price.gpu in load_specs() and price.source for price in prices)
    assert max(price.date for price in prices) <= TODAY
    assert load_prices(PRICES_FILE, today=TODAY) == prices


def test_a_gpu_without_a_price_from_the_provider_names_the_other_offers() -> None:
    prices = load_prices()
    assert latest(prices, "nvidia-b200") is None
    assert latest(prices, "nvidia-a10g") is None
    none = advice(prices, "nvidia-b200", None, "spot price from X", TODAY)
    assert none.startswith("nvidia-b200: no spot price from X up to 2026-")
    for words in ("Hyperstack", "Lambda", "--provider", "--price nvidia-b200="):
        assert words in none
    old = advice(prices, "nvidia-l40s", latest(prices, "nvidia-l40s", on=TODAY), "", TODAY)
    assert re.search(r"decides no ranking.*Modal on-demand, 2026-05-07", old)
    assert advice(prices, "nvidia-a10g", None, "price").endswith(
        "no price. To give one: --price nvidia-a10g=USD_PER_HOUR"
    )
    with pytest.raises(UsageError, match="no prices from provider 'Nobody'; known: AWS"):
        latest(prices, "nvidia-l4", provider="Nobody")
    with pytest.raises(UsageError, match="valid are on-demand, spot"):
        latest(prices, "nvidia-l4", kind="reserved")


def test_a_price_is_found_for_python_as_for_the_command_line() -> None:
    found = find_price("nvidia-h100-sxm", on="2025-11-15")
    assert found is not None
    assert (found.usd_per_hour, found.age_days) == (2.69, 0)
    given = find_price("my-own-gpu", 1.25)
    assert given is not None
    assert given.label == "$1.25/h as given"
    assert find_price("my-own-gpu") is None
    lambdas = find_price("nvidia-b200", provider="Lambda")
    assert lambdas is not None
    assert lambdas.usd_per_hour == 6.69
    with pytest.raises(UsageError, match="on is 'today': valid is a day"):
        find_price("nvidia-l4", on="today")
    with pytest.raises(UsageError, match="usd_per_hour is '-1'"):
        find_price("nvidia-l4", -1)


# --- files of the user


def test_csv_and_toml_say_the_same(tmp_path: Path) -> None:
    from_csv = load_prices(book(tmp_path, "# mine\n" + HEADER + GOOD + "\n"), today=TODAY)
    toml = (
        "[[price]]\ngpu = 'nvidia-l4'\nprovider = 'Me'\nkind = 'on-demand'\nusd_per_hour = 0.5\n"
        "date = 2025-01-02\nsource = 'invoice'\n"
    )
    assert load_prices(book(tmp_path, toml, "prices.toml"), today=TODAY) == from_csv
    assert latest(from_csv, "nvidia-l4") == from_csv[0]  # the only provider of a book of one's own


def test_optional_columns_and_own_gpus(tmp_path: Path) -> None:
    path = book(tmp_path, "usd_per_hour,gpu,provider,kind,date\n0.1,my-gpu,Me,spot,2025-01-02\n")
    (price,) = load_prices(path, known_gpus=["my-gpu"], today=TODAY)
    assert (price.gpu, price.date_inferred, price.source) == ("my-gpu", False, "prices.csv")


BAD = {
    "H100,Me,on-demand,2,2025-01-01,false,x": "line 3: GPU 'H100' is ambiguous: nvidia-h100-pcie or nvidia-h100-sxm",
    "nvidia-l4,Me,on-demand,0,2025-01-03,false,x": "line 3: usd_per_hour is '0'",
    "nvidia-l4,Me,on-demand,-1,2025-01-03,false,x": "line 3: usd_per_hour is '-1'",
    "nvidia-l4,Me,on-demand,nan,2025-01-03,false,x": "line 3: usd_per_hour is 'nan'",
    "nvidia-l4,Me,on-demand,inf,2025-01-03,false,x": "line 3: usd_per_hour is 'inf'",
    "nvidia-l4,Me,on-demand,$2,2025-01-03,false,x": "line 3: usd_per_hour is '\\$2'",
    "nvidia-l4,Me,on-demand,,2025-01-03,false,x": "line 3: usd_per_hour is ''",
    "nvidia-l4,Me,on-demand,2,2026-11-23,false,x": "line 3: date 2026-11-23 lies in the future",
    "nvidia-l4,Me,on-demand,2,late 2025,false,x": "line 3: date is 'late 2025'",
    "nvidia-l4,Me,ondemand,2,2025-01-03,false,x": "line 3: kind is 'ondemand'",
    "nvidia-l4,Me,on-demand,2,2025-01-03,maybe,x": "line 3: date_inferred is 'maybe'",
    "nvidia-l4,,on-demand,2,2025-01-03,false,x": "line 3: no provider",
    "nvidia-l4,Me,on-demand,2": "line 3: 4 fields where the header names 7",
    "nvidia-l4,Me,on-demand,0.6,2025-01-02,false,x": "line 3: nvidia-l4 from Me .* given on line 2 already",
    "NVIDIA A100,Me,on-demand,2,2025-01-01,false,x": "line 3: GPU 'NVIDIA A100' is ambiguous: nvidia-a100-40gb-sxm or",
    "nvidia-h300,Me,on-demand,2,2025-01-01,false,x": "line 3: unknown GPU 'nvidia-h300'",
    "nvidia-l4,Me,spot,0.5,2025-01-02,false,x": "line 3: spot price 0.5 .* equals its on-demand price 0.5 on line 2",
    "nvidia-l4,Me,spot,0.9,2025-01-02,false,x": "line 3: spot price 0.9 .* above its on-demand price 0.5 on",
    'nvidia-l4,Me,spot,"0.9,2025-01-02,false,x': "line 3: a quote is opened and not closed on that line",
    'nvidia-l4,Me,spot,"0.9"x,2025-01-02,false,x': "line 3: not CSV .* write a quote twice",
}


@pytest.mark.parametrize("row", BAD)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str) -> None:
    with pytest.raises(DataError, match=BAD[row]):
        load_prices(book(tmp_path, HEADER + GOOD + row + "\n"), today=TODAY)


def test_a_bad_toml_table_is_refused_with_its_line(tmp_path: Path) -> None:
    table = "[[price]]\ngpu = 'nvidia-l4'\nprovider = 'Me'\nkind = 'spot'\nusd_per_hour = {}\ndate = 2025-01-02\n"
    path = book(tmp_path, table.format(1) + "\n" + table.format(-1), "prices.toml")
    with pytest.raises(DataError, match="line 8: usd_per_hour is -1"):
        load_prices(path, today=TODAY)
    with pytest.raises(DataError, match="is not TOML"):
        load_prices(book(tmp_path, "[[price\n", "prices.toml"))
    with pytest.raises(DataError, match="line 1: missing column"):
        load_prices(book(tmp_path, "[[price]]\ngpu = 'nvidia-l4'\n", "prices.toml"))
    with pytest.raises(DataError, match="no \\[\\[price\\]\\] tables"):
        load_prices(book(tmp_path, "price = 3\n", "prices.toml"))


def test_a_file_that_is_no_price_book_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: missing columns kind, date"):
        load_prices(book(tmp_path, "gpu,provider,usd_per_hour\nnvidia-l4,Me,1\n"))
    with pytest.raises(DataError, match="holds a header and no rows"):
        load_prices(book(tmp_path, HEADER))
    with pytest.raises(UsageError, match="does not exist"):
        load_prices(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-16"):
        load_prices(tmp_path / "binary.csv")


def test_a_book_of_several_providers_does_not_choose_among_them(tmp_path: Path) -> None:
    path = book(tmp_path, HEADER + GOOD + "nvidia-l4,You,on-demand,0.4,2025-01-02,false,x\n")
    prices = load_prices(path, today=TODAY)
    assert latest(prices, "nvidia-l4") is None
    assert usd(prices, "nvidia-l4", provider="You") == 0.4


@settings(deadline=None)
@given(st.lists(st.dates(date(2020, 1, 1), date(2026, 1, 1)), min_size=1, unique=True), st.integers(-400, 2600))
def test_latest_is_the_newest_not_after_the_day(days: list[date], offset: int) -> None:
    prices = [replace(parse_override("nvidia-l4=1"), provider="Me", date=day) for day in days]
    on = date(2020, 1, 1) + timedelta(days=offset)
    found = latest(prices, "nvidia-l4", on=on)
    assert (found.date if found else None) == max((day for day in days if day <= on), default=None)


def test_a_book_is_written_as_it_is_read(tmp_path: Path) -> None:
    prices = newest(load_prices(), on=ARTICLE_DATE)
    assert len({(p.gpu, p.provider, p.kind) for p in prices}) == len(prices) > 10
    path = tmp_path / "new" / "mine.csv"
    write_prices(prices, path)
    assert load_prices(path, today=TODAY) == prices
    with pytest.raises(UsageError, match="cannot be written"):
        write_prices(prices, path / "below-a-file.csv")


# --- prices given on the command line


def test_a_given_price_wins_over_the_book() -> None:
    prices = with_overrides(load_prices(), [parse_override("nvidia-h100-sxm=2.49")])
    for options in ({}, {"on": ARTICLE_DATE}, {"kind": "spot"}, {"provider": "Lambda"}):
        price = latest(prices, "nvidia-h100-sxm", **options)
        assert price is not None
        assert price.usd_per_hour == 2.49
        assert price.label == "$2.49/h as given"
    assert usd(prices, "nvidia-l4") == 0.49


@pytest.mark.parametrize(
    "text", ["nvidia-l4", "=2", "nvidia-l4=", "nvidia-l4=-1", "nvidia-l4=0", "h100=2", "nvidia-l4=x"]
)
def test_a_bad_override_is_bad_use(text: str) -> None:
    with pytest.raises(UsageError, match="price"):
        parse_override(text)


@pytest.mark.parametrize(
    ("value", "said"), [("[" * 3000 + "]" * 3000, "nested too deeply"), ("9" * 5000, "4300 digits")]
)
def test_what_python_s_parser_gives_up_on_is_told(tmp_path: Path, value: str, said: str) -> None:
    book = tmp_path / "book.toml"
    book.write_text(f"[[price]]\nusd_per_hour = {value}\n")
    with pytest.raises(DataError, match=f"book.toml is not TOML: .*{said}"):
        load_prices(book)
