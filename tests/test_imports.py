"""The import rule: rooms import rooms below them, and what answers on a laptop loads nothing heavy.

- Rooms stand in the order of `studies.house.ROOMS`, and imports go down, those inside functions and those for type
  checkers too. No module imports itself through others, and the product imports no study.

- `kernels` imports nothing of ours but itself; triton only in `triton_*.py`, which are imported lazily.
- `microbench` imports kernels, errors and itself.
- `roofline` imports the shapes of `kernels`, and the records and plans of `microbench`: plain data, no torch.
  What runs kernels it imports lazily, and only where a command does so. torch and transformers are for the
  tracer alone: `TRACERS`.

Read from the source, so that imports on branches no test takes are seen too; then checked on live processes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from studies import house
from studies.house import ROOMS, room_of
from studies.imports import FACES, PARTS, ROOT, arrows, imports_of, module_of, sources

TORCH = {"torch", "transformers", "triton"}
HEAVY = TORCH | {"numpy", "pandas", "scipy", "matplotlib"}

TRACERS = "flopcast.roofline.stream.tracer"
# What runs kernels or steps on this machine.
RUNNERS = ("flopcast.roofline.cli", "flopcast.roofline.validation")
# What of the other parts is plain data; `test_importing_roofline_does_not_load_torch` holds them to it.
PLAIN = (
    {"flopcast.kernels.shapes"}
    | {
        f"flopcast.kernels.{name}"
        for name in (
            "attention_blocks",
            "attention_config",
            "attention_schedule",
            "matmul_law",
            "matmul_table",
            "row_tiles",
        )
    }
    | {f"flopcast.microbench.records.{name}" for name in ("kernel_sources", "machine", "records", "row_shapes", "rows")}
    | {"flopcast.microbench.recipe.plans", "flopcast.microbench.recipe.layout", "flopcast.microbench.recipe.settings"}
)
SHARED = {
    "flopcast", "flopcast.bounds", "flopcast.child", "flopcast.decode", "flopcast.errors", "flopcast.files",
    "flopcast.gc_pause", "flopcast.json_files", "flopcast.progress",
}  # fmt: skip


SOURCES = sources()


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def violations(module: str, source: str, known: Mapping[str, str]) -> list[str]:
    """What the rule has against the imports of one module, each as 'line N: reason'."""
    found = []
    for item in imports_of(source):
        if item.typing:
            continue
        target = module_of(item.name, known)
        if reason := objection(module, target, item.lazy):
            found.append(f"line {item.line}: {module} imports {target}: {reason}")
    return found


def objection(module: str, target: str, lazy: bool) -> str | None:
    """Why `module` may not import `target`; None if it may."""
    ours = target.partition(".")[0] == "flopcast"
    triton_kernel = target.startswith("flopcast.kernels.triton_")
    if target == "triton" and not module.startswith("flopcast.kernels.triton_") and not lazy:
        return "triton exists on Linux only: import it in kernels/triton_*.py"
    if triton_kernel and not lazy and not module.startswith("flopcast.kernels.triton_"):
        return "Triton kernels are imported lazily, triton exists on Linux only"
    if is_in(module, "flopcast.kernels"):
        if ours and not is_in(target, "flopcast.kernels") and target not in SHARED:
            return "kernels import nothing of ours but what all share"
    elif is_in(module, "flopcast.microbench"):
        if is_in(target, "flopcast.roofline"):
            return "microbench measures, roofline interprets"
    elif is_in(module, "flopcast.roofline"):
        if target in TORCH and not is_in(module, TRACERS):
            return "only the tracer imports torch, transformers or triton"
        if is_in(module, TRACERS) or target in PLAIN:
            return None
        if is_in(target, "flopcast.kernels"):
            return "roofline imports the shapes of kernels only"
        if is_in(target, "flopcast.microbench"):
            if not module.startswith(RUNNERS):
                return f"only {', '.join(RUNNERS)} run kernels"
            if not lazy:
                return "import what runs kernels inside the function that needs it"
    elif ours and target not in SHARED and not lazy:
        return "the top package imports none of its parts before they are asked for"
    return None


def loaded_by(module: str, known: Mapping[str, str]) -> set[str]:
    """Every module of ours and every foreign package that importing `module` loads, through any chain."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += [parent for parent in known if name.startswith(parent + ".")]  # their __init__.py runs too
        if name in known:
            todo += [module_of(i.name, known) for i in imports_of(known[name]) if not (i.lazy or i.typing)]
    return seen


# `python -m flopcast` is the command line: it stands above the parts, not among them.
@pytest.mark.parametrize("module", sorted(m for m in SOURCES if m != "flopcast.__main__" and not is_in(m, "studies")))
def test_imports_follow_the_rule(module: str) -> None:
    assert violations(module, SOURCES[module], SOURCES) == []


def test_imports_go_down_only() -> None:
    up = [
        f"{importer} imports {imported}"
        for importer, imported in arrows(SOURCES)
        if ROOMS.index(room_of(imported)) > ROOMS.index(room_of(importer))
    ]
    assert not up, "these rooms stand in the other order in studies/house.py: " + "; ".join(up)


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported in arrows(SOURCES):
        graph.setdefault(importer, set()).add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_room_exists() -> None:
    """A package that holds its docstring alone stands in none."""
    modules = {m for m, source in SOURCES.items() if m not in FACES and len(ast.parse(source).body) > 1}
    assert {room_of(module) for module in modules} == set(ROOMS)


@pytest.mark.parametrize("folder", sorted({f.parent for p in PARTS[1:] for f in (ROOT / p).rglob("*.py")}))
def test_a_room_has_fifteen_modules_at_most(folder: Path) -> None:
    assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= 15


def test_the_picture_is_of_today() -> None:
    assert (ROOT / "docs" / "rooms.svg").read_text() == house.svg(arrows(SOURCES)), "run `python -m studies.house`"


def test_every_door_is_drawn() -> None:
    assert {house.door_of(room) for room in ROOMS} == {door.name for row in house.DOORS for door in row}


def test_roofline_has_ten_doors_at_most() -> None:
    doors = [folder for folder in (ROOT / "roofline").iterdir() if (folder / "__init__.py").is_file()]
    assert len(doors) <= 10


@pytest.mark.parametrize(
    "module", sorted(m for m in SOURCES if is_in(m, "flopcast.roofline") and not is_in(m, TRACERS))
)
def test_importing_roofline_does_not_load_torch(module: str) -> None:
    assert loaded_by(module, SOURCES) & TORCH == set()


@pytest.mark.parametrize(
    "module", ["flopcast", "flopcast.errors", "flopcast.kernels.shapes", "flopcast.roofline.cli.app"]
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert module in SOURCES
    assert loaded_by(module, SOURCES) & HEAVY == set()


PROBES = {
    "flopcast.errors": "",
    "flopcast.kernels.shapes": "",
    "flopcast.kernels.matmul": "import torch",
    "flopcast.microbench.records.records": "",
    "flopcast.microbench.recipe.training_step": "import torch",
    "flopcast.roofline.gpu.profile.profile": "",
    f"{TRACERS}.trace": "import torch",
}


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("flopcast.kernels.matmul", "from flopcast.kernels.shapes import Gemm", True),
        ("flopcast.kernels.matmul", "from flopcast.errors import UsageError", True),
        ("flopcast.kernels.matmul", "import triton", False),
        ("flopcast.kernels.matmul", "def f():\n    from flopcast.kernels import triton_matmul", True),
        ("flopcast.kernels.triton_matmul", "import triton.language as tl", True),
        ("flopcast.microbench.sweep.sweep", "from flopcast.kernels.matmul import run", True),
        ("flopcast.microbench.sweep.sweep", "def f():\n    import flopcast.roofline.gpu.profile.profile", False),
        (
            "flopcast.microbench.sweep.sweep",
            "if TYPE_CHECKING:\n    import flopcast.roofline.gpu.profile.profile",
            True,
        ),
        ("flopcast.roofline.gpu.fit.rows", "from flopcast.microbench.records import records", True),
        ("flopcast.roofline.gpu.fit.rows", "from flopcast.kernels import matmul", False),
        ("flopcast.roofline.gpu.fit.rows", "def f():\n    from flopcast.microbench.recipe import training_step", False),
        ("flopcast.roofline.gpu.fit.rows", "try:\n    import torch.nn\nexcept ImportError:\n    pass", False),
        ("flopcast.roofline.gpu.fit.rows", "def f():\n    import torch", False),
        (
            "flopcast.roofline.cli.app",
            "def f():\n    from flopcast.microbench.recipe.training_step import TrainingStep",
            True,
        ),
        ("flopcast.roofline.cli.app", "from flopcast.microbench.recipe.training_step import TrainingStep", False),
        (f"{TRACERS}.trace", "import torch\nfrom flopcast.microbench.recipe.training_step import TrainingStep", True),
    ],
)
def test_the_rule_itself(module: str, source: str, allowed: bool) -> None:
    assert (violations(module, source, PROBES) == []) is allowed


def test_a_chain_of_imports_is_followed() -> None:
    chain = {
        "flopcast.roofline.a": "from flopcast.roofline import b",
        "flopcast.roofline.b": "from flopcast.roofline.c import x",
        "flopcast.roofline.c": "import torch.nn\ndef f():\n    import scipy",
    }
    assert loaded_by("flopcast.roofline.a", chain) & HEAVY == {"torch"}


def modules_after(code: str) -> set[str]:
    """Modules and top-level packages loaded by a fresh interpreter that ran `code`, however it exits."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit as exit:\n    assert not exit.code, exit\n"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script + "print('\\nLOADED', *sys.modules, *{m.partition('.')[0] for m in sys.modules})",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize(
    "module",
    ["gpu.profile.profile", "step.forecast", "dollars.crossovers", "gpu.catalogue.prices", "stream.library.streams"],
)
def test_a_live_import_loads_neither_torch_nor_pandas_nor_scipy(module: str) -> None:
    loaded = modules_after(f"import flopcast.roofline.{module}")
    assert "flopcast" in loaded
    assert loaded & (TORCH | {"pandas", "scipy", "matplotlib"}) == set()


def run_command(*arguments: str) -> str:
    return f"from flopcast.roofline.cli.app import main; sys.argv = ['flopcast', *{arguments}]; main()"


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_after(run_command("--help"))
    assert "typer" in loaded
    assert loaded & HEAVY == set()
    assert not {"flopcast.decode", "flopcast.kernels.shapes"} & loaded
    recipe = "flopcast.microbench.recipe"  # its settings say what the options are
    assert {name for name in loaded if name.startswith("flopcast.microbench.")} == {recipe, f"{recipe}.settings"}


def test_a_cached_predict_loads_neither_torch_nor_pandas_nor_scipy() -> None:
    loaded = modules_after(run_command("predict", "--gpu", "nvidia-h200", "--config", "qwen3-0.6b", "--json"))
    assert loaded & (TORCH | {"pandas", "scipy", "matplotlib"}) == set()
