"""What a terminal gets: in any encoding, of any length, and when Ctrl-C ends the command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast import __main__ as entry
from flopcast.errors import LONGEST_MESSAGE, UsageError
from flopcast.roofline.cli import app
from flopcast.roofline.cli.gpu import bench
from flopcast.roofline.cli.shared.characters import never_fail_to_encode

Command = Callable[..., Any]


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "+-3% 5 us caf\\xe9 ... \\u4e2d \\udcff"), ("latin-1", "\xb13% 5 \xb5s caf\xe9 ... \\u4e2d \\udcff")],
)
def test_only_characters_that_an_encoding_lacks_are_replaced(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding=encoding))
    never_fail_to_encode()
    print("\xb13% 5 \xb5s caf\xe9 \u2026 \u4e2d \udcff", flush=True)
    assert kept.getvalue().decode(encoding).rstrip() == shown.replace("caf\\xe9", "cafe")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments", [("compare", "nvidia-l4", "nvidia-l40s"), ("predict", "--help"), ("predict", "--gpu", "\u4e2d\udcff")]
)
def test_tables_help_and_errors_in_a_poor_terminal(
    monkeypatch: pytest.MonkeyPatch, encoding: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flopcast", *arguments])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code in (0, 2, 3)  # 3: `compare` found one slower


def test_a_value_of_a_message_is_shortened_and_cannot_steer_the_terminal(flopcast: Command, tmp_path: Path) -> None:
    assert len(str(UsageError(f"width is {'9' * 100_000}: valid is less"))) < 300
    assert len(str(UsageError("many " * 100_000))) < LONGEST_MESSAGE
    assert (
        str(UsageError("gpu \x1b[2J\x9b is unknown\nvalid:\tothers")) == "gpu \\x1b[2J\\x9b is unknown\nvalid:\tothers"
    )
    for arguments in (("--width", "9" * 100_000), ("--config", "x" * 100_000), ("--" + "x" * 100_000,)):
        found = flopcast("predict", "--gpu", "nvidia-h200", *arguments)
        assert (found.code, found.out, len(found.err) < 1000) == (2, "", True)
        assert "100,00" in found.err


def test_ctrl_c_while_modules_load_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loading:
        def find_spec(self, name: str, *_: object) -> None:
            if name == app.__name__:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, app.__name__)
    monkeypatch.setattr(sys, "meta_path", [Loading(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert (left.value.code, *capsys.readouterr()) == (130, "", "flopcast: stopped\n")


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(
    flopcast: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(*_: object, **__: object) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_bench", measured)
    found = flopcast("bench", "--out", tmp_path / "out")
    assert (found.code, found.err) == (130, "flopcast: stopped; no measurement had been finished\n")
    (tmp_path / "out" / "gpu0").mkdir(parents=True)
    (tmp_path / "out" / "gpu0" / "measurements.jsonl").write_text('{}\n{}\n{"torn')
    found = flopcast("bench", "--out", tmp_path / "out")
    assert found.code == 130
    assert f"2 finished measurements are kept in {tmp_path / 'out'}: the same command continues there" in found.err
