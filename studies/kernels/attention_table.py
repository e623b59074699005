"""What `attention_tune.py` measured, as text and as the table that the kernels read.

    python -m studies.kernels.attention_table JSONL DEVICE TRITON

writes to standard output what `kernels/data/attention_*.json` holds; DEVICE as the driver calls it, "NVIDIA H200".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flopcast.kernels.attention_config import FORMAT, place_of
from studies.command import parser_of

NEAR = 1.015  # as fast as: what two runs of one tile differ by


def summary(out: Path) -> str:
    """Best candidate of each kernel and shape beside the peers, as TFLOP/s."""
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    table: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = {}
    for x in lines:
        if x["what"] != "time" or (x["kernel"] != "peer" and not x["error_over_tolerance"] <= 1):
            continue
        row = table.setdefault((x["ptxas"][-20:], x["head_dim"], x["causal"], x["direction"], x["seq"]), {})
        name = x["tile"] if x["kernel"] == "peer" else x["kernel"]
        if name not in row or x["seconds"] < row[name][0]:
            row[name] = (x["seconds"], x["tile"])
            row["flops"] = (x["tflops"] * x["seconds"], "")
    text = []
    for place, row in sorted(table.items(), key=str):
        flops = row.pop("flops")[0]
        cells = [
            f"{name} {flops / s:.0f} {tile if not name.startswith('sdpa') else ''}" for name, (s, tile) in row.items()
        ]
        parts = [row[name][0] for name in ("prepare", "dkdv", "dq") if name in row]
        if len(parts) == 3:
            cells.append(f"two-kernel {flops / sum(parts):.0f}")
        text.append(f"{place}: " + " | ".join(cells))
    return "\n".join(text)


def fewest(times: dict[int, dict[str, float]]) -> dict[int, str]:
    """By length a tile within NEAR of the fastest, of as few different tiles as that takes: greedily, each time the
    one that serves most of the lengths left, and among those the fastest there."""
    left, chosen = set(times), dict[int, str]()
    while left:
        served = {
            tile: [seq for seq in left if times[seq].get(tile, 9e9) <= NEAR * min(times[seq].values())]
            for tile in {tile for seq in left for tile in times[seq]}
        }
        tile = max(
            served, key=lambda t: (len(served[t]), -sum(times[seq][t] / min(times[seq].values()) for seq in served[t]))
        )
        chosen |= dict.fromkeys(served[tile], tile)
        left -= set(served[tile])
    return chosen


def table_from(out: Path, device: str, triton: str, shapes: str) -> dict[str, Any]:
    """The document of `kernels/data/attention_*.json`: at each length a fast tile that was right there."""
    places: dict[str, dict[int, dict[str, float]]] = {}
    for text in out.read_text().splitlines():
        x = json.loads(text)
        if x["what"] != "time" or x["kernel"] in ("peer", "prepare") or not x["error_over_tolerance"] <= 1:
            continue
        times = places.setdefault(place_of(x["kernel"], x["head_dim"], x["causal"]), {})
        times.setdefault(x["seq"], {})[x["tile"]] = x["seconds"]
    return {
        "format": FORMAT,
        "device": device,
        "triton": triton,
        "shapes": shapes,
        "choices": {
            place: {str(seq): tile for seq, tile in sorted(fewest(times).items())}
            for place, times in sorted(places.items())
        },
    }


if __name__ == "__main__":
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("measured", type=Path, help="the JSON lines of attention_tune")
    parser.add_argument("device")
    parser.add_argument("triton", help="version")
    given = parser.parse_args()
    shapes = "bf16, 16 query and 8 key-value heads, 16384 tokens"
    print(json.dumps(table_from(given.measured, given.device, given.triton, shapes), indent=1))
