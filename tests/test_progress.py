"""What is shown of how far something is: a bar on a terminal, lines in a log, nothing of what is short."""

from __future__ import annotations

import io
import time

import pytest

from flopcast.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds between any two looks at the clock."""
    ticks = iter(range(0, 10_000, 4))
    monkeypatch.setattr("flopcast.progress.monotonic", lambda: float(next(ticks)))


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
@pytest.mark.parametrize("total", [3, None])
def test_nothing_is_shown_of_what_is_short(stream: io.StringIO, total: int | None) -> None:
    with progress("measuring", total, in_logs=True, stream=stream) as shown:
        for unit in "abc":
            shown.advance(unit)
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("slow_clock")
def test_a_log_has_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("measuring", 10, in_logs=True) as shown:
        for unit in range(10):
            shown.advance(str(unit))
    out, err = capsys.readouterr()
    assert out == ""
    assert "measuring: 2/10, about 32 s left" in err
    assert "\x1b" not in err


@pytest.mark.usefixtures("slow_clock")
def test_a_log_has_nothing_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("forecasting") as shown:
        for done in range(10):
            shown.update(done, 10)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_counts_seconds_until_there_is_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopcast.progress.QUIET_SECONDS", 0.01)
    monkeypatch.delenv("TERM", raising=False)
    stream = Terminal()
    with progress("tracing", stream=stream) as shown:
        time.sleep(0.2)
        assert stream.getvalue() == "\rtracing ... 0 s"
        shown.update(1, 3)
        assert stream.getvalue().startswith("\rtracing ... 0 s\r\x1b[K")
        assert "1/3" in stream.getvalue()


def test_a_dumb_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopcast.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress("forecasting", 3, stream=stream) as shown:
        shown.advance()
    assert stream.getvalue() == ""
