"""The import rule: kernels <- microbench <- roofline, and what answers on a laptop loads nothing heavy.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kernels", "microbench", "roofline")

TORCH = {"torch", "transformers", "triton"}
HEAVY = TORCH | {"numpy", "pandas", "scipy", "matplotlib"}

TRACERS = {
    f"flopcast.roofline.{name}"
    for name in (
        "trace", "trace_lean", "step_recording", "recorder", "module_stack",
        "cuda_semantics", "cuda_autocast", "cuda_operators",
    )
}  # fmt: skip
TRACER = "flopcast.roofline.trace"
# Commands that run kernels or steps on this machine; names begin so (cli.py, cli_bench.py).
RUNNERS = ("flopcast.roofline.cli", "flopcast.roofline.validate")
# What of the other parts is plain data; `test_importing_roofline_does_not_load_torch` holds them to it.
PLAIN = (
    {"flopcast.kernels.shapes"}
    | {f"flopcast.kernels.{name}" for name in ("attention_config", "matmul_configs", "matmul_table")}
    | {f"flopcast.microbench.{name}" for name in ("records", "plans", "kernel_sources")}
)
SHARED = {"flopcast", "flopcast.errors"}


@dataclass(frozen=True)
class Import:
    """One imported name, as dotted as the source has it; `lazy` when inside a function."""

    name: str
    lazy: bool
    line: int


def imports_of(source: str) -> Iterator[Import]:
    """All imports of a module except those for type checkers. Relative ones do not exist (ruff, TID)."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, lazy, node.lineno)
            case ast.ImportFrom():
                assert node.level == 0, f"line {node.lineno}: relative import"
                for alias in node.names:
                    yield Import(f"{node.module}.{alias.name}", lazy, node.lineno)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for child in node.orelse:
                    yield from walk(child, lazy)
            case _:
                lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, lazy)

    yield from walk(ast.parse(source), lazy=False)


def sources() -> dict[str, str]:
    """Module name -> source, of every module of ours."""
    files = [*(ROOT / "src" / "flopcast").glob("*.py"), *(f for p in PARTS for f in (ROOT / p).rglob("*.py"))]
    found = {}
    for file in files:
        base = ROOT / "src" / "flopcast" if file.is_relative_to(ROOT / "src") else ROOT
        parts = ("flopcast", *file.relative_to(base).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(encoding="utf-8")
    return found


SOURCES = sources()


def module_of(name: str, known: Mapping[str, str]) -> str:
    """The module that an imported name is or lies in: `flopcast.errors.DataError` -> `flopcast.errors`.

    A name of ours that is no module of ours stays as it is (`flopcast.kernels` is a namespace folder).
    """
    if name.partition(".")[0] != "flopcast":
        return name.partition(".")[0]
    candidates = (name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1))
    return next((c for c in candidates if c in known and c != "flopcast"), name)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def violations(module: str, source: str, known: Mapping[str, str]) -> list[str]:
    """What the rule has against the imports of one module, each as 'line N: reason'."""
    found = []
    for item in imports_of(source):
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
        if ours and not is_in(target, "flopcast.kernels"):
            return "kernels import nothing of ours"
    elif is_in(module, "flopcast.microbench"):
        if is_in(target, "flopcast.roofline"):
            return "microbench measures, roofline interprets"
    elif is_in(module, "flopcast.roofline"):
        if target in TORCH and module not in TRACERS:
            return "only the tracer imports torch, transformers or triton"
        if module in TRACERS or target in PLAIN:
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
            todo += [module_of(i.name, known) for i in imports_of(known[name]) if not i.lazy]
    return seen


# `python -m flopcast` is the command line: it stands above the parts, not among them.
@pytest.mark.parametrize("module", sorted(set(SOURCES) - {"flopcast.__main__"}))
def test_imports_follow_the_rule(module: str) -> None:
    assert violations(module, SOURCES[module], SOURCES) == []


@pytest.mark.parametrize(
    "module", sorted(m for m in SOURCES if m.startswith("flopcast.roofline") and m not in TRACERS)
)
def test_importing_roofline_does_not_load_torch(module: str) -> None:
    assert loaded_by(module, SOURCES) & TORCH == set()


@pytest.mark.parametrize(
    "module", ["flopcast", "flopcast.errors", "flopcast.kernels.shapes", "flopcast.roofline.cli"]
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert module in SOURCES
    assert loaded_by(module, SOURCES) & HEAVY == set()


PROBES = {
    "flopcast.errors": "",
    "flopcast.kernels.shapes": "",
    "flopcast.kernels.matmul": "import torch",
    "flopcast.microbench.records": "",
    "flopcast.microbench.steps": "import torch",
    "flopcast.roofline.profile": "",
    TRACER: "import torch",
}


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("flopcast.kernels.matmul", "from flopcast.kernels.shapes import Gemm", True),
        ("flopcast.kernels.matmul", "from flopcast.errors import UsageError", False),
        ("flopcast.kernels.matmul", "import triton", False),
        ("flopcast.kernels.matmul", "def f():\n    from flopcast.kernels import triton_matmul", True),
        ("flopcast.kernels.triton_matmul", "import triton.language as tl", True),
        ("flopcast.microbench.sweep", "from flopcast.kernels.matmul import run", True),
        ("flopcast.microbench.sweep", "def f():\n    import flopcast.roofline.profile", False),
        ("flopcast.microbench.sweep", "if TYPE_CHECKING:\n    import flopcast.roofline.profile", True),
        ("flopcast.roofline.fit", "from flopcast.microbench import records", True),
        ("flopcast.roofline.fit", "from flopcast.kernels import matmul", False),
        ("flopcast.roofline.fit", "def f():\n    from flopcast.microbench import steps", False),
        ("flopcast.roofline.fit", "try:\n    import torch.nn\nexcept ImportError:\n    pass", False),
        ("flopcast.roofline.fit", "def f():\n    import torch", False),
        ("flopcast.roofline.cli", "def f():\n    from flopcast.microbench.steps import TrainingStep", True),
        ("flopcast.roofline.cli", "from flopcast.microbench.steps import TrainingStep", False),
        (TRACER, "import torch\nfrom flopcast.microbench.steps import TrainingStep", True),
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
    """Top-level packages loaded by a fresh interpreter that ran `code`, however it exits."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit as exit:\n    assert not exit.code, exit\n"
    done = subprocess.run(
        [sys.executable, "-c", script + "print('\\nLOADED', *{m.partition('.')[0] for m in sys.modules})"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize("module", ["profile", "forecast", "cost", "prices", "gpus", "models", "stream"])
def test_a_live_import_loads_neither_torch_nor_pandas_nor_scipy(module: str) -> None:
    loaded = modules_after(f"import flopcast.roofline.{module}")
    assert "flopcast" in loaded
    assert loaded & (TORCH | {"pandas", "scipy", "matplotlib"}) == set()


def run_command(*arguments: str) -> str:
    return f"from flopcast.roofline.cli import main; sys.argv = ['flopcast', *{arguments}]; main()"


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_after(run_command("--help"))
    assert "typer" in loaded
    assert loaded & HEAVY == set()


def test_a_cached_predict_loads_neither_torch_nor_pandas_nor_scipy() -> None:
    loaded = modules_after(run_command("predict", "--gpu", "nvidia-h200", "--config", "qwen3-0.6b", "--json"))
    assert loaded & (TORCH | {"pandas", "scipy", "matplotlib"}) == set()
