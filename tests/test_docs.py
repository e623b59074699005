"""The guide and the README: commands exist with the options shown, links lead somewhere, Python and shell run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml  # type: ignore[import-untyped]

from flopcast.roofline.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
EXAMPLES = sorted((ROOT / "docs" / "examples").iterdir())


FRAMES = re.compile("[\u2500-\u257f]")  # what tables are drawn with on a terminal


def commands_in(text: str) -> list[list[str]]:
    """The words after `flopcast` of each command that a text shows, in a block or between backticks."""
    blocks = re.findall(r"^ {4,}(.*)$", text, re.M)
    spans = re.findall(r"`(flopcast [^`]+)`", text)
    found = []
    for line in [*blocks, *spans]:
        for part in re.split(r"&&|\|\||;", line.split(" #")[0]):
            words = shlex.split(part, posix=True) if part.count("'") % 2 == 0 else part.split()
            names = [i for i, word in enumerate(words) if word == "flopcast" or word.endswith("/flopcast")]
            if names and words[: names[0]] in ([], ["exec"], ["$"]) and len(words) > names[0] + 1:
                found.append(words[names[0] + 1 :])
    return found


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each command."""
    group = typer.main.get_command(app.app)
    commands = group.commands  # type: ignore[attr-defined]
    return {
        name: {
            "--help",
            *(o for p in command.params for o in (*getattr(p, "opts", ()), *getattr(p, "secondary_opts", ()))),
        }
        for name, command in commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_shown_exist_with_their_options(page: Path, options: dict[str, set[str]]) -> None:
    for words in commands_in(page.read_text(encoding="utf-8")):
        name = words[0]
        if name.startswith("-") or not re.fullmatch(r"[a-z][a-z-]+", name):
            continue
        assert name in options, f"{page.name}: flopcast {' '.join(words)}"
        for word in words[1:]:
            if re.match(r"--[a-z]", word):
                assert word.split("=")[0] in options[name], f"{page.name}: flopcast {' '.join(words)}"


def test_the_guide_shows_commands() -> None:
    """The test above looks at something."""
    shown = {words[0] for page in PAGES for words in commands_in(page.read_text(encoding="utf-8"))}
    assert {"bench", "fit", "predict", "widths", "compare", "cost", "plan", "report", "validate"} <= shown


def outputs_in(text: str) -> list[tuple[list[str], list[str]]]:
    """Each command after a `$` with the output shown below it, as pieces between the `...` of what is left out."""
    blocks = re.findall(r"^ {4}\$ flopcast (.*)\n((?: {4}.*\n)+)", text, re.M)
    return [
        (shlex.split(command), [piece for piece in re.split(r"\.{3}", output) if piece.strip()])
        for command, output in blocks
    ]


README_OUTPUTS = outputs_in((ROOT / "README.md").read_text(encoding="utf-8"))


QUICK = [(words, pieces) for words, pieces in README_OUTPUTS if words[0] != "widths"]  # that one takes 20 s


@pytest.mark.parametrize(("words", "pieces"), QUICK, ids=[words[0] for words, _ in QUICK])
def test_the_outputs_of_the_readme_are_what_the_commands_print(
    words: list[str], pieces: list[str], flopcast: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    day = ["--on", "2026-11-15"] if words[0] == "predict" else []  # from which the age of a price is counted
    done = flopcast(*words, *day)
    assert done.code == 0, done.err
    printed = " ".join(FRAMES.sub(" ", done.out).split())
    for piece in pieces:
        assert " ".join(piece.split()) in printed


def test_the_readme_is_short_and_answers_three_questions() -> None:
    assert (ROOT / "README.md").stat().st_size <= 9000
    assert [words[0] for words, _ in README_OUTPUTS] == ["roofline", "predict", "widths"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in contents


def test_python_shown_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds = float(done.stdout.split()[0])
    assert 1e-4 < seconds < 1


def test_examples_are_well_formed() -> None:
    """bash takes the scripts, YAML the tasks, and all call commands that exist."""
    scripts, tasks = {"slurm-array.sh", "slurm-links.sh"}, {"skypilot.yaml", "skypilot-links.yaml"}
    assert {path.name for path in EXAMPLES} == {"Dockerfile", *scripts, *tasks}
    for name in scripts if shutil.which("bash") else ():
        subprocess.run(["bash", "-n", ROOT / "docs" / "examples" / name], check=True)
    for name in tasks:
        task = yaml.safe_load((ROOT / "docs" / "examples" / name).read_text(encoding="utf-8"))
        assert set(task) - {"num_nodes"} == {"name", "workdir", "resources", "setup", "run"}
        assert "flopcast bench --suite" in task["run"]


def _fakes(folder: Path, *names: str) -> None:
    """Commands that print what they are called with; scontrol names two hosts."""
    for name in names:
        fake = folder / name
        fake.parent.mkdir(parents=True, exist_ok=True)
        says = "printf 'node0\\nnode1\\n'" if fake.name == "scontrol" else 'echo "$MASTER_ADDR" "$@"'
        fake.write_text(f"#!/bin/sh\n{says}\n")
        fake.chmod(0o755)


def test_processes_of_several_hosts_are_told_where_the_first_one_is(tmp_path: Path) -> None:
    if not shutil.which("bash"):
        pytest.skip("no bash")
    _fakes(tmp_path, "srun", "scontrol", ".venv/bin/torchrun")
    suite = ["bench", "--suite", "collectives", "--out", "links"]
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[0-1]", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    script = str(ROOT / "docs" / "examples" / "slurm-links.sh")
    done = subprocess.run(["bash", script], env=slurm, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["node0", ".venv/bin/flopcast", *suite]
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1",
           "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": "/usr/bin:/bin"}  # fmt: skip
    task = yaml.safe_load((ROOT / "docs" / "examples" / "skypilot-links.yaml").read_text(encoding="utf-8"))
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=sky, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    words = done.stdout.split()
    assert words[words.index("--master-addr") + 1] == "10.0.0.1"
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[-6:] == ["flopcast", *suite]


def test_an_array_task_writes_its_own_folder(tmp_path: Path) -> None:
    """Task 3 of an array measures into out/gpu3; without an array the script says how it is called."""
    if not shutil.which("bash"):
        pytest.skip("no bash")
    script = ROOT / "docs" / "examples" / "slurm-array.sh"
    fake = tmp_path / ".venv" / "bin" / "flopcast"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    environment = {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = ["bash", str(script)]
    done = subprocess.run(
        run, env={**environment, "SLURM_ARRAY_TASK_ID": "3"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["bench", "--suite", "standard", "--out", "out/gpu3"]
    refused = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "--array" in refused.stderr
