"""The real files that are damaged, and the commands that read each."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopcast.roofline.gpu.fit.rows import fit
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.library.stored import cached_path, stream_key
from flopcast.roofline.stream.library.streams import folded, get_stream
from flopcast.roofline.stream.model.run import Run
from studies.fuzz import mutate
from studies.imports import ROOT

REPORTS = ROOT / "reports" / "nvidia-h200"
H200 = "nvidia-h200"
MODEL = ("--config", "qwen3-0.6b")  # its stream ships: nothing is traced
ROWS = 5  # of each kind, of those that a folder holds many of


@dataclass(frozen=True)
class Target:
    """A file at `path` below the folder of an example, damaged by `damage`; one of `commands` then reads it. In a
    command FILE stands for the file, DIR for the folder, OUT for a new file's name."""

    name: str
    path: str
    damage: mutate.Damage
    commands: tuple[str, ...]


MODEL_WORDS = " ".join(MODEL)
TARGETS = (
    Target(
        "profile",
        "profile.json",
        mutate.damaged_json,
        (
            f"predict --gpu FILE {MODEL_WORDS} --json",
            "roofline --gpu FILE --json",
            "compare FILE DIR/whole.json --json",
            f"explain --gpu FILE {MODEL_WORDS}",
            "kernels --gpu FILE --from DIR/shapes.csv --out OUT.csv",
        ),
    ),
    Target(
        "host",
        "host.json",
        mutate.damaged_json,
        (
            f"predict --gpu nvidia-l4 {MODEL_WORDS} --host FILE --json",
            f"explain --gpu nvidia-l4 {MODEL_WORDS} --host FILE --json",
        ),
    ),
    Target(
        "machine",
        "rows/machine.json",
        mutate.damaged_json,
        (
            "fit DIR/rows --out OUT.json",
            "compare DIR/rows DIR/whole.json",
            "validate --gpu DIR/whole.json --steps-from DIR/steps --json",
        ),
    ),
    Target(
        "measurements",
        "rows/measurements.jsonl",
        mutate.damaged_lines,
        ("fit DIR/rows --out OUT.json", "compare DIR/rows DIR/whole.json --json"),
    ),
    Target(
        "steps",
        "steps/measurements.jsonl",
        mutate.damaged_lines,
        (
            "validate --gpu DIR/whole.json --steps-from DIR/steps --out OUT --json",
            "validate --gpu DIR/whole.json --steps-from DIR/steps --out OUT",
        ),
    ),
    Target(
        "report.json",
        "pages/gpu/report.json",
        mutate.damaged_json,
        ("report --gpu nvidia-l4 --out DIR/pages/l4 --index DIR/pages",),
    ),
    Target(
        "prices csv",
        "book.csv",
        mutate.damaged_csv,
        (
            "prices --prices FILE --json",
            "prices --prices FILE --out OUT.csv",
            f"predict --gpu {H200} {MODEL_WORDS} --prices FILE --json",
        ),
    ),
    Target(
        "prices toml",
        "book.toml",
        mutate.damaged_toml,
        (
            "prices --prices FILE --json",
            "prices --prices FILE",
            f"predict --gpu {H200} {MODEL_WORDS} --prices FILE --json",
        ),
    ),
    Target(
        "catalogue",
        "vms.csv",
        mutate.damaged_csv,
        ("prices --from FILE --json", "prices --from FILE --provider lambda --date 2026-01-01"),
    ),
    Target(
        "config",
        "config.json",
        mutate.damaged_json,
        ("predict --gpu nvidia-l4 --config FILE --batch 1 --seq 16 --json",),
    ),
    Target("sweep", "steps.csv", mutate.damaged_csv, ("sweep --gpu nvidia-l4 --from FILE --out OUT.csv --json",)),
    Target("kernels", "shapes.csv", mutate.damaged_csv, ("kernels --gpu nvidia-l4 --from FILE --out OUT.csv",)),
    Target(
        "published table",
        "table.csv",
        mutate.damaged_csv,
        (
            "import FILE --gpu nvidia-l4 --source fuzz --out OUT.json --json",
            "import FILE --gpu nvidia-l4 --source fuzz --out OUT.json --skip-refused",
        ),
    ),
    Target(
        "stream",
        "stream.json.gz",
        mutate.packed(mutate.damaged_json),
        ("predict --gpu nvidia-l4 --config DIR/config.json --batch 1 --seq 16 --json",),
    ),
)
# Commands whose words are damaged in place of a file.
COMMANDS = (
    f"predict --gpu {H200} {MODEL_WORDS} --batch 8 --seq 1024 --optimizer adamw-fused --accumulate 2 --json",
    "predict --gpu nvidia-l4 --width 512 --host none --price nvidia-l4=0.5 --provider acme --on 2026-01-01",
    f"explain --gpu nvidia-l4 {MODEL_WORDS} --precision bf16 --attention sdpa",
    "widths --gpu nvidia-l4 --around 512 --axis heads --no-shapes --tolerate 3 --json",
    "cost --gpus nvidia-l4,nvidia-h200 --widths 512 --hosts own --kind spot --json",
    "plan --config qwen3-0.6b --tokens 10B --gpus nvidia-h200 --batch 4 --seq 1024 --json",
    "plan --config qwen3-0.6b --budget-usd 100 --gpus nvidia-h200 --json",
    "roofline --gpu nvidia-l4 --json",
    "compare nvidia-l4 nvidia-l40s --tolerance 0.1 --json",
    "prices --gpu nvidia-h200 --on 2026-01-01 --json",
)


def make(folder: Path) -> None:
    """Writes the real files that examples begin with."""
    card = REPORTS / "measurements" / "gpu3"
    _write_rows(folder / "rows", _some(card, ("gemm", "call", "attention", "scalar", "host", "host_op")), card)
    steps = _some(REPORTS / "steps" / "run0", ("step", "step_kernels", "host", "step_estimate"), most=2)
    _write_rows(folder / "steps", steps, REPORTS / "steps" / "run0")
    profile, _ = fit(folder / "rows")
    profile.save(folder / "profile.json")
    shutil.copy(folder / "profile.json", folder / "whole.json")
    host = find_profile(H200).host
    assert host is not None
    host.save(folder / "host.json")
    (folder / "pages" / "gpu").mkdir(parents=True)
    shutil.copy(REPORTS / "report.json", folder / "pages" / "gpu")
    (folder / "pages" / "gpu" / "report.html").write_text("<p>a page</p>")
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip("\n"), encoding="utf-8")
    config = json.loads(FILES["config.json"])
    traced = Run(batch=1, seq=16).traced_on("cuda")
    get_stream(config, traced)  # into the cache
    shutil.copy(cached_path(stream_key(folded(config, traced), traced)), folder / "stream.json.gz")


def _some(source: Path, kinds: tuple[str, ...], most: int = ROWS) -> list[dict[str, Any]]:
    """Rows of a folder, as many of each kind as an example needs: all that are not operations."""
    path = next(source.glob("measurements.jsonl*"))
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for line in lines:
        row = json.loads(line)
        kind = row["key"].partition("/")[0]
        if kind in found and row["status"] == "ok":
            found[kind].append(row)
    many = ("scalar", "host", "host_op")
    return [
        row
        for kind, rows in found.items()
        for row in (rows if kind in many else rows[:: max(1, -(-len(rows) // most))])
    ]


def _write_rows(folder: Path, rows: list[dict[str, Any]], source: Path) -> None:
    folder.mkdir()
    shutil.copy(source / "machine.json", folder)
    (folder / "measurements.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


FILES = {
    "book.csv": """
gpu,provider,kind,usd_per_hour,date,source
nvidia-h200,acme,on-demand,1.25,2025-01-01,https://example.com
nvidia-h200,acme,spot,0.75,2025-01-01,
nvidia-l4,acme,on-demand,0.5,2026-01-01,
""",
    "book.toml": """
[[price]]
gpu = "nvidia-h200"
provider = "acme"
kind = "on-demand"
usd_per_hour = 1.5
date = 2025-02-01
[[price]]
gpu = "nvidia-l4"
provider = "acme"
kind = "spot"
usd_per_hour = 0.5
date = 2025-02-01
""",
    "vms.csv": """
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_1x_h100_sxm5,H100-SXM,1.0,26.0,200.0,3.29,us-east-1,"{'Gpus': [{'Name': 'H100'}]}",
gpu_8x_h100_sxm5,H100-SXM,8.0,208.0,1800.0,23.92,us-east-1,,
gpu_1x_a10,A10G,1.0,30.0,200.0,0.75,us-west-1,,0.4
""",
    "config.json": """
{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500, "tie_word_embeddings": true, "rope_theta": 10000.0,
 "layer_types": ["full_attention", "full_attention"], "attention_bias": false, "hidden_act": "silu"}
""",
    "steps.csv": """
name,config,width,depth,batch,seq,optimizer,precision,accumulate,matmul,heads,ffn
shipped,qwen3-0.6b,,,,,,,,,,
ladder,,512,,,,adamw-fused,,,,,
""",
    "shapes.csv": """
name,op,m,n,k,layout,batch,heads,kv_heads,seq,head_dim,causal,direction,dtype,backend,cache
square,gemm,4096,4096,4096,nt,,,,,,,,bf16,torch,cold
tall,gemm,8192,1024,3072,tn,,,,,,,,bf16,torch,hot
odd,gemm,1000,1001,999,nt,,,,,,,,fp32,torch,cold
attention,attention,,,,,4,16,8,1024,128,true,fwd,bf16,sdpa,cold
backward,attention,,,,,4,16,8,1024,128,true,bwd,bf16,sdpa-flash,cold
""",
    "table.csv": "op,m,n,k,layout,dtype,latency_ms\n" + "".join(
        f"gemm,{256 * i},1024,1024,nt,bf16,{0.01 * i:.2f}\n" for i in range(1, 25)),
}  # fmt: skip
