"""Remakes the shipped host: the mean of all machines whose host was measured.

python -m studies.shipped.hosts [--out FILE] [FOLDER ...]
python -m studies.shipped.hosts --operators          only what calls of Triton's operators cost
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import cast

from flopcast import files
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import Row
from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.fit.host import OPERATORS, operator_costs
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import DEFAULT, HOSTS, HostCosts, combine, default_host
from flopcast.roofline.gpu.profile.profile import Profile
from studies.command import parser_of
from studies.compiled.host import with_compiled

# Before, each eager call of a Triton operator made its launches anew, which cost the host five to ten times as much.
REPLAYED = "2026-11-23T08:19"
# Before, these were called with one tensor for two operands, as no model does, and such a call is not replayed.
DISTINCT = "2026-11-25T01:45"
OF_ONE_TENSOR = ("rope_qk_norm", "rope_qk_norm_backward", "mm")
REPORTS = Path(__file__).resolve().parents[2] / "reports"


def measured_folders(reports: Path = REPORTS) -> list[Path]:
    """The folders of measurements, of any depth, in which tiny models calibrated the host of a GPU."""
    found = sorted(path.parent for path in reports.glob("*/**/measurements.jsonl.gz"))
    return [folder for folder in found if _has_host(folder)]


def _has_host(folder: Path) -> bool:
    rows = records.read(folder).rows
    return any(row["key"].startswith("host/") and row["status"] == "ok" for row in rows)


def machine_of(folder: Path) -> str:
    """What tells machines apart: the GPU's serial number, as a machine has one GPU here or was measured through one."""
    return str(records.read_machine(folder)["device"].get("uuid"))


def host_of_machines(folders: Iterable[Path], without: Collection[str] = ()) -> HostCosts:
    """The mean of the machines that were measured in `folders`, each of one or several runs, but for those left out."""
    runs: dict[str, list[HostCosts]] = defaultdict(list)
    for folder in folders:
        if (machine := machine_of(folder)) not in without:
            runs[machine].append(fit_host_folder(folder))
    return combine([combine(own) for own in runs.values()], of="machines")


def operators_of_machines(*, replayed: bool = True, reports: Path = REPORTS) -> dict[str, float]:
    """Host seconds per call of each Triton operator, the mean of the machines on which they were measured, with tiny
    models or without: of operators that replay their launches, as today's do, or of those before."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(reports.glob("*/**/measurements.jsonl.gz")):
        folder = path.parent
        rows = [row for row in _operator_rows(path) if _is_wanted(row, replayed)]
        for name, seconds in operator_costs(cast(list[FitRow], rows)).items():
            found[name][machine_of(folder)].append(seconds)
    return {name: _mean([_mean(own) for own in machines.values()]) for name, machines in sorted(found.items())}


def _operator_rows(path: Path) -> list[Row]:
    """A file's rows of operators. Its other lines, most of all, are left unread: parsing them took 10 s."""
    lines = [line for line in files.read(path).split(b"\n") if f'"{OPERATORS}'.encode() in line]
    return records.parse(b"\n".join([*lines, b""]), path).rows if lines else []


@cache
def _before_replay() -> dict[str, float]:
    return operators_of_machines(replayed=False)


def launching_anew(profile: Profile) -> Profile:
    """The profile with what Triton's operators cost the host while each call made its launches anew: of steps that ran
    so."""
    return profile if profile.host is None else replace(profile, host=replace(profile.host, triton=_before_replay()))


def _is_wanted(row: Row, replayed: bool) -> bool:
    time = row.get("time", "")
    if replayed and row["key"].removeprefix(OPERATORS) in OF_ONE_TENSOR:
        return time >= DISTINCT
    return (time >= REPLAYED) == replayed


def _mean(values: Sequence[float]) -> float:
    """The geometric mean, as of all costs of hosts; of values of which one is 0 the arithmetic one."""
    return geometric_mean(values) if min(values) > 0 else fmean(values)


def main() -> None:
    """Writes one host made of the machines whose measurements lie in the folders, by default all in `reports`."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("folder", type=Path, nargs="*", help="that `flopcast bench` or `flopcast validate` wrote")
    parser.add_argument("--out", type=Path, default=HOSTS / f"{DEFAULT}.json")
    parser.add_argument("--operators", action="store_true", help="leave its other costs as they are")
    given = parser.parse_args()
    folders = given.folder or measured_folders()
    host = default_host() if given.operators else with_compiled(host_of_machines(folders))
    if not given.folder:
        host = replace(host, triton=operators_of_machines())
    host.save(given.out)
    print(f"wrote {given.out}: {host.name}, {host.n_machines} machines, deviation {host.sigma:.0%}")


if __name__ == "__main__":
    main()
