"""Host profiles: what the host spends on a step, in a small file of its own, apart from any GPU's.

A step needs both; `--host` combines one machine's host with another's GPU. Files are JSON, {"schema", "kind": "host",
...} with the fields of `HostCosts`; those of the machines that the shipped GPUs were measured in lie in
`data/hosts`, and

    python -m flopcast.roofline.hosts OUT FOLDER ...

makes one from the measurements of several machines of one processor.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from flopcast.errors import DataError, UsageError
from flopcast.roofline.profile import HostCosts

SCHEMA = 1
KIND = "host"
HOSTS = Path(__file__).parent / "data" / "hosts"
PHASES = ("forward", "backward", "optimizer")
_NUMBERS = ("step_fixed", "sigma")


def to_json(host: HostCosts) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": KIND, **asdict(host)}


def save(host: HostCosts, path: Path | str) -> None:
    """Writes the host whole or not at all. Raises UsageError when it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(to_json(host), indent=1, allow_nan=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}: give another --out") from error


def load(path: Path | str) -> HostCosts:
    """Raises DataError when the file is missing, malformed, of a newer schema, or no host."""
    record = _read(Path(path))
    if not is_host(record):
        raise DataError(
            f'{path} is no host: an object with "kind": "{KIND}" is expected; `flopcast fit` makes it'
        )
    return from_json(record, str(path))


def from_json(record: Mapping[str, Any], name: str = "host") -> HostCosts:
    """Raises DataError, naming what is wrong."""
    if not isinstance(record.get("schema"), int) or record["schema"] > SCHEMA:
        raise DataError(
            f"{name}: schema {record.get('schema')!r} is not one that this flopcast reads ({SCHEMA}): upgrade flopcast"
        )
    known = {field.name for field in fields(HostCosts)}
    try:
        host = HostCosts(**{key: value for key, value in record.items() if key in known})
    except TypeError as error:
        raise DataError(f"{name} is a malformed host: {error}") from None
    costs = [value for phase in PHASES for value in _values(getattr(host, phase), f"{name}: {phase}")]
    costs += _values(host.triton, f"{name}: triton")
    for value in (*costs, *(getattr(host, number) for number in _NUMBERS)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise DataError(f"{name} is a malformed host: {value!r} is no cost: valid are seconds, 0 or more")
    return host


def _values(costs: Any, name: str) -> Iterable[Any]:
    if not isinstance(costs, dict):
        raise DataError(f"{name} is {costs!r}: an object of seconds by kind of op is expected")
    return costs.values()


def is_host(record: Any) -> bool:
    return isinstance(record, dict) and record.get("kind") == KIND


def host_in(path: Path) -> HostCosts | None:
    """The host of a host file; None for a file of another kind (a GPU's profile). Raises DataError as `load`."""
    record = _read(path)
    return from_json(record, str(path)) if is_host(record) else None


def _read(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: `flopcast bench --suite host` and `flopcast fit` make a host"
        ) from None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise DataError(f"{path} is not JSON: {error}; `flopcast fit DIR` makes hosts and profiles") from None


def known_hosts(folder: Path = HOSTS) -> dict[str, Path]:
    """The hosts kept in a folder, name -> file."""
    if not folder.is_dir():
        return {}
    return {path.stem: path for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")}


def combine(hosts: Sequence[HostCosts]) -> HostCosts:
    """One host for several machines of a processor: each cost the geometric mean, `sigma` widened by what their layers
    differ by. Raises ValueError for hosts of different processors, or none."""
    import numpy as np

    if len({host.cpu for host in hosts}) != 1:
        raise ValueError(
            f"hosts of one processor are combined, not of {sorted({host.cpu for host in hosts})}"
        )
    first, *others = hosts
    if not others:
        return first

    def mean(values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else float(np.mean(values))

    costs: dict[str, Any] = {
        phase: {
            kind: mean([getattr(h, phase).get(kind, 0.0) for h in hosts]) for kind in getattr(first, phase)
        }
        for phase in PHASES
    }
    layers = [host.layers["step"]["seconds"] for host in hosts if host.layers]
    between = float(np.log(layers).std(ddof=1)) if len(layers) > 1 else 0.0
    merged: dict[str, Any] = {
        key: first.layers[key] for key in ("model", "mode", "depths") if key in first.layers
    }
    for phase in (*PHASES, "step"):
        own = [host.layers[phase] for host in hosts if phase in host.layers]
        if own:
            merged[phase] = {
                "seconds": mean([one["seconds"] for one in own]),
                "fixed": mean([one["fixed"] for one in own]),
                "low": min(one["low"] for one in own),
                "high": max(one["high"] for one in own),
                "machines": [one["seconds"] for one in own],
            }
    operators = {name for host in hosts for name in host.triton}
    triton = {
        name: mean([host.triton[name] for host in hosts if name in host.triton]) for name in sorted(operators)
    }
    return replace(
        first, **costs, triton=triton, step_fixed=mean([host.step_fixed for host in hosts]),
        sigma=float(np.hypot(np.median([host.sigma for host in hosts]), between)),
        date=max(host.date for host in hosts), layers=merged,
    )  # fmt: skip


# --- for the terminal

LAYER_COLUMNS = ("phase", "ms a layer", "over rounds", "between depths", "once a step, ms", "us a launch")


def layer_rows(host: HostCosts) -> list[list[str]]:
    """Cells: what each phase costs by layer, with its spread, and by launch."""
    rows = []
    for phase in (*PHASES, "step"):
        layer = host.layers.get(phase)
        launch = "" if phase == "step" else f"{getattr(host, phase).get('launch', 0.0) * 1e6:.1f}"
        if layer is None:
            rows.append([phase, "", "", "", "", launch])
            continue
        between = ", ".join(f"{name}: {value * 1e3:.3f}" for name, value in layer.get("between", {}).items())
        spread = f"{layer['low'] * 1e3:.3f} to {layer['high'] * 1e3:.3f}"
        rows.append(
            [phase, f"{layer['seconds'] * 1e3:.3f}", spread, between, f"{layer['fixed'] * 1e3:.2f}", launch]
        )
    return rows


def machines_of(host: HostCosts) -> str:
    """How many machines a host is the mean of, and from what to what a step's ms a layer went among them."""
    each = [seconds * 1e3 for seconds in host.layers.get("step", {}).get("machines", ())]
    return f"{len(each)}: {min(each):.1f} to {max(each):.1f}" if each else "1"


def summary(host: HostCosts) -> list[str]:
    """Cells of one line: ms a layer of forward, backward and optimizer, machines, deviation, day."""
    layers = [
        f"{host.layers[phase]['seconds'] * 1e3:.3f}" if phase in host.layers else "-" for phase in PHASES
    ]
    return [*layers, machines_of(host), f"{host.sigma:.0%}", host.date or "-"]


def main(arguments: Sequence[str]) -> None:
    """OUT FOLDER ...: one host of the machines whose measurements lie in the folders."""
    from flopcast.roofline.host_folder import fit_host_folder

    out, *folders = arguments
    host = combine([fit_host_folder(Path(folder)) for folder in folders])
    save(host, Path(out))
    print(f"wrote {out}: {host.name}, {len(folders)} machines, deviation {host.sigma:.0%}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m flopcast.roofline.hosts OUT FOLDER ...")
    main(sys.argv[1:])
