"""Commands answer as they did: the quick cases of `golden_answers/` (half a minute; all take three minutes, and
`python tests/golden_answers/answers.py` compares them byte for byte before and after a change)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent / "golden_answers"


@pytest.fixture(scope="session")
def answers(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(FOLDER / "answers.py")


def quick() -> list[str]:
    import tomllib

    cases = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))
    return list(cases["quick"])


@pytest.mark.parametrize("command", quick())
def test_the_answer_is_the_one_that_is_kept(command: str, answers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words exactly; numbers within a millionth, since sums are made in another order where there are other processors
    (or, of times, within a picosecond)."""
    for name, value in answers.SETTINGS.items():
        monkeypatch.setenv(name, value)
    found = answers.answer(command)
    differing = answers.differing_lines(
        answers.golden()[command], found, relative=answers.RELATIVE, absolute=answers.ABSOLUTE
    )
    assert differing == [], f"flopcast {command}\n" + "\n".join(differing[:20])


def test_every_case_has_its_answer(answers: ModuleType) -> None:
    assert sorted(answers.golden()) == sorted(answers.ALL)
    assert len(set(answers.ALL)) == len(answers.ALL)


def test_a_difference_is_told_by_its_line(answers: ModuleType) -> None:
    kept = {"exit code": "0", "stdout": '{\n "seconds": 1.0,\n "bound": "host"\n}\n'}
    within = {"exit code": "0", "stdout": '{\n "seconds": 1.0000001,\n "bound": "host"\n}\n'}
    beyond = {"exit code": "1", "stdout": '{\n "seconds": 1.00001,\n "bound": "memory"\n}\n'}
    assert answers.differing_lines(kept, within, relative=1e-6) == []
    assert answers.differing_lines(kept, within) == [
        "stdout, line 2: ' \"seconds\": 1.0,' is now ' \"seconds\": 1.0000001,'"
    ]
    told = answers.differing_lines(kept, beyond, relative=1e-6)
    assert [line.partition(":")[0] for line in told] == ["exit code, line 1", "stdout, line 2", "stdout, line 3"]
