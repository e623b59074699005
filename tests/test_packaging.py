"""What is installed, and what a clone of the repository promises.

The layout has two traps (both seen): a `kernels/__init__.py`, or a wheel with a top-level `kernels`, shadows
Hugging Face's package of that name, which transformers imports where it is installed. An import test would
pass wherever it is not, so the files themselves are looked at.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flopcast

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kernels", "microbench", "roofline")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def git(*arguments: str) -> str:
    """Output of git in the repository; skips the test where this is no clone (an unpacked source archive)."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git clone")
    # a clone owned by someone else (a container's mount) is read all the same
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


# --- layout


def test_kernels_is_a_namespace_folder() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("part", ["microbench", "roofline"])
def test_the_other_parts_are_packages(part: str) -> None:
    assert (ROOT / part / "__init__.py").is_file()


@pytest.mark.parametrize("part", PARTS)
def test_the_import_package_links_to_the_parts(part: str) -> None:
    link = ROOT / "src" / "flopcast" / part
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{part}"
    assert (link / "shapes.py").exists() or (link / "__init__.py").exists()


@pytest.mark.parametrize("part", PARTS)
def test_the_links_are_committed_as_links(part: str) -> None:
    mode = git("ls-files", "--stage", f"src/flopcast/{part}").split()[0]
    assert mode == "120000"


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert "make test" in script.read_text(encoding="utf-8")
    assert git("ls-files", "--stage", ".ci/run").split()[0] == "100755"


# --- distributions, built offline with the build tools of the environment


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel made from that; in `direct/`, the wheel of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *PARTS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=ignore)  # there to be left out

    out = tmp_path_factory.mktemp("dist")
    for arguments in (["--outdir", str(out)], ["--wheel", "--outdir", str(out / "direct")]):
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", *arguments, str(tree)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = (dist / "direct").glob("*.whl")
    return path


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_installs_flopcast_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"flopcast-{flopcast.__version__}-py3-none-any.whl"
    tops = {name.partition("/")[0] for name in contents(wheel)}
    assert tops == {"flopcast", f"flopcast-{flopcast.__version__}.dist-info"}
    assert "flopcast/kernels/__init__.py" not in contents(wheel)


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    expected = {"flopcast/__init__.py", "flopcast/errors.py", "flopcast/py.typed"}
    for part in PARTS:
        for file in (ROOT / part).rglob("*"):
            name = file.relative_to(ROOT)
            is_data = name.parts[:2] in (("roofline", "data"), ("kernels", "data")) and not file.name.startswith(".")
            if file.is_file() and "__pycache__" not in name.parts and (file.suffix == ".py" or is_data):
                expected.add(f"flopcast/{name.as_posix()}")
    shipped = {name for name in contents(wheel) if name.startswith("flopcast/")}
    assert expected - shipped == set()


def test_the_wheel_holds_no_tests_caches_or_reports(wheel: Path) -> None:
    unwanted = re.compile(r"(^|/)(tests?|reports|__pycache__)(/|$)|\.pyc$|(^|/)(test_|conftest)")
    assert [name for name in contents(wheel) if unwanted.search(name)] == []


def test_a_wheel_made_from_the_source_archive_is_the_same(dist: Path, wheel: Path) -> None:
    (second,) = dist.glob("*.whl")
    assert contents(second) == contents(wheel)
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        assert not any(member.issym() for member in source)


def test_the_unpacked_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import flopcast; from flopcast.kernels.shapes import Gemm;"
        "from flopcast.roofline.gpu.catalogue import datasheets;"
        "print(flopcast.__file__, Gemm(m=2, n=3, k=5).flops, len(datasheets.load_specs()) > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "flopcast" / "__init__.py"), "60", "True"]


def test_the_command_exists() -> None:
    (command,) = entry_points(group="console_scripts", name="flopcast")
    assert callable(command.load())


# --- versions


def test_the_version_is_said_alike_everywhere() -> None:
    assert PROJECT["version"] == flopcast.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## \[([^]]+)\]", changelog, flags=re.MULTILINE)[0]
    assert newest == flopcast.__version__, "CHANGELOG.md has no entry for this version"


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_constraints_are_plain_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    # no local version (+cpu), no URL or file, no extras; a marker may follow
    plain = re.compile(r"[a-z0-9-]+==[0-9]+(\.[0-9]+)*(\.?(post|rc|a|b)[0-9]+)?( ; .+)?")
    assert [line for line in pinned if not plain.fullmatch(line)] == []
    assert pinned == sorted(pinned)


def test_constraints_pin_every_requirement_within_its_bounds() -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for text in requirements:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins()[requirement.name]), text


def test_torch_and_triton_are_the_pair_that_resolves() -> None:
    # torch 2.13.0's CUDA build requires exactly triton 3.7.1; transformers is the one of the H200 runs
    assert {name: pins()[name] for name in ("torch", "triton", "transformers")} == {
        "torch": "2.13.0",
        "triton": "3.7.1",
        "transformers": "5.17.0",
    }


# --- text


# Spelt so that this file does not match itself. Torch's own index, which the README names, is not among them.
HOSTS = ["py" + "pi.org", "python" + "hosted"]
FOLDERS = ["work", "root", "home", "Users", "opt", "mnt"]
MACHINE_PATH = re.compile(rf"(?<![\w.~/:-])/({'|'.join(FOLDERS)})/[\w.-]")


def test_no_text_names_a_package_registry_or_a_path_of_one_machine() -> None:
    found = []
    for name in git("ls-files").splitlines():
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # images, compressed data
        for number, line in enumerate(text.splitlines(), start=1):
            where = MACHINE_PATH.search(line)
            seen = [host for host in HOSTS if host in line] + ([where.group()] if where else [])
            found += [f"{name}:{number}: {match}" for match in seen]
    assert found == []
