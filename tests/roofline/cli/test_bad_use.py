"""Bad use, failures and exit codes: what people and scripts are told, and that nothing is written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import RunError
from flopcast.roofline.cli.shared import output
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.stream.model.models import load_config

H200 = "nvidia-h200"
Command = Callable[..., Any]


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flopcast", *arguments], capture_output=True, text=True, timeout=60)


QWEN3 = load_config("qwen3-0.6b")
FILES: dict[str, str | bytes] = {
    "not.json": "width: 512",
    "list.json": "[]",
    "deep.json": "[" * 100_000,
    "odd-kind.json": '{"model_type": ["qwen3"]}',
    "kindless.json": '{"hidden_size": 64}',
    "alien.json": '{"model_type": "no-such-model", "hidden_size": 64, "num_hidden_layers": 2}',
    "heads.json": json.dumps({**QWEN3, "num_attention_heads": 6, "num_key_value_heads": 4}),
    "negative.json": json.dumps({**QWEN3, "hidden_size": -64}),
    "text.json": json.dumps({**QWEN3, "num_hidden_layers": "two"}),
    "newer.json": '{"schema": 99, "surfaces": {}}',
    "plain": "a file, not a folder",
    "fixed.py": "import torch\ndef five():\n    return torch.nn.Linear(64, 8), torch.randn(5, 64)\n",
    "leaves.py": "import sys\nsys.exit(0)\n",
    "hollow.py": "import torch\ndef none():\n    return torch.nn.Linear(64, 8), torch.randn(0, 64)\n"
    "def odd():\n    return torch.nn.Linear(64, 8), torch.randn(4, 65)\n",
    "empty.csv": "",
    "typo.csv": "width,bach\n512,4\n",
    "twice.csv": "width,width\n512,256\n",
    "kernels-typo.csv": "op,m,n,k,layuot\ngemm,64,64,64,nn\n",
    "steps.csv": "width\n512\n",
    "shapes.csv": "m,n,k\n64,64,64\n",
    "quote.csv": 'm,n,k,layout\n64,64,64,"nt\n64,64,64,nn\n',
    "one.csv": "m,n,k,latency_ms\n1024,1024,1024,1.0\n",
    "header.csv": "m,n,k,latency_ms\n",
    "latin.csv": b"m,n,k,layout\n64,64,64,nt\n64,64,64,n\xfc\n",
    "latin.toml": b"[[price]]\nprovider = 'M\xfcller'\n",
    "latin.json": b'{"model_type": "qwen3",\n "name": "M\xfcller"}',
    "prices.csv": "gpu,provider,kind,usd_per_hour,date\nnvidia-h200,RunPod Secure Cloud,on-demand,-3,2026-01-01\n",
}

TABLES = (
    f"sweep --gpu {H200} --from {{}} --out out.csv", f"kernels --gpu {H200} --from {{}} --out out.csv",
    "import {} --gpu nvidia-l4 --source me --out out.json", "prices --prices {}", "prices --from {}",
)  # fmt: skip
REPORTS = Path(__file__).resolve().parents[3] / "reports" / "nvidia-h200"
STEPS = REPORTS / "steps"
MEASURED = REPORTS / "measurements" / "gpu5" / "run2"
SIZES = "valid is an integer of at least 1"
MEASURE = ("flopcast bench", "flopcast fit")

BAD_USE: dict[str, tuple[str, Sequence[str]]] = {
    # GPUs and profiles
    "unknown GPU": ("predict --gpu h300 --width 512", ("'h300'", "nvidia-h200", "nvidia-l4", *MEASURE)),
    "a GPU misspelt": ("predict --gpu nvidia-h20 --width 512", ("Did you mean nvidia-h200",)),
    "neither one GPU nor several": ("predict --width 512", ("which GPU?", "--gpu", "flopcast gpus")),
    "one GPU and several": (f"predict --gpu {H200} --gpus l4 --width 512", ("with --gpus", "leave it out")),
    "several GPUs as one": ("predict --gpu H200,L4 --width 512", ("names several GPUs", "--gpus H200,L4")),
    "one of several unknown": ("predict --gpus H200,h300 --width 512", ("unknown GPU 'h300'",)),
    "an order of one GPU": (f"predict --gpu {H200} --width 512 --sort time", ("--sort time", "without --gpus")),
    "an unknown order": ("predict --gpus h200,l4 --width 512 --sort price", ("'price'", "time, memory, dollars")),
    "several GPUs explained": ("predict --gpus h200,l4 --width 512 --explain", ("--explain", "of one GPU")),
    "a table too short to fit": ("import one.csv --gpu L4 --source me", ("1 rows of nvidia-l4", "needs 20")),
    "a sweep of nothing": (f"sweep --gpu {H200}", ("which steps?", "--from", "--batches")),
    "a sweep of no batches": (f"sweep --gpu {H200} --width 512 --batches 5..2", ("'5..2'", "1..20")),
    "a sweep of endless batches": (f"sweep --gpu {H200} --width 512 --batches 1..100000", ("at most 1000",)),
    "batches twice": (f"sweep --gpu {H200} --width 512 --batches 1..2 --batch 4", ("--batch", "give one of the two")),
    "a width of a table and an option": (
        f"sweep --gpu {H200} --from steps.csv --width 512 --out out.csv", ("--width", "column width of steps.csv"),
    ),
    "models of a table with a module": (
        f"sweep --gpu {H200} --from steps.csv --module fixed:five --out out.csv", ("unknown columns width", "batch"),
    ),
    "a GPU of several boards": ("predict --gpu A100 --width 512", ("nvidia-a100-40gb-sxm or", "name the board")),
    "unmeasured processor": ("predict --gpu cpu --width 512", ("processor", "--device cpu", *MEASURE)),
    "missing profile": ("predict --gpu no.json --width 512", ("no.json", "does not exist", "flopcast fit")),
    "no profile at all": ("predict --gpu not.json --width 512", ("not.json", "not a profile", "flopcast fit")),
    "a folder as profile": ("predict --gpu ./ --width 512", ("is a folder",)),
    "newer profile": ("predict --gpu newer.json --width 512", ("schema 99", "(1)", "upgrade")),
    "unknown host": (f"predict --gpu {H200} --width 512 --host h300", ("'h300'", "nvidia-h200")),
    # models
    "no model": (f"predict --gpu {H200}", ("no model", "config", "width")),
    "unknown config": (f"predict --gpu {H200} --config qwen9", ("'qwen9'", "qwen3-0.6b", "config.json")),
    "config not JSON": (f"predict --gpu {H200} --config not.json", ("not.json", "not JSON", "config.json")),
    "config nested without end": (f"predict --gpu {H200} --config deep.json", ("deep.json", "not JSON")),
    "profile nested without end": ("predict --gpu deep.json --width 512", ("deep.json", "not a profile")),
    "host nested without end": (f"predict --gpu {H200} --width 512 --host deep.json", ("deep.json", "too deeply")),
    "config with a list for a kind": (
        f"predict --gpu {H200} --config odd-kind.json", ("odd-kind.json", "model_type is ['qwen3']")),
    "config no object": (f"predict --gpu {H200} --config list.json", ("list.json", "model_type")),
    "config of no type": (f"predict --gpu {H200} --config kindless.json", ("kindless.json", "model_type")),
    "config of unknown type": (
        f"predict --gpu {H200} --config alien.json", ("'no-such-model'", "causal language model")),
    "config with bad heads": (
        f"predict --gpu {H200} --config heads.json", ("heads 6", "kv_heads 4", "valid kv_heads are 1, 2, 3, 6")),
    "config with a negative size": (f"predict --gpu {H200} --config negative.json", ("hidden_size", "-64", SIZES)),
    "config with text for a size": (f"predict --gpu {H200} --config text.json", ("'two'", SIZES)),
    "config and shape": (f"predict --gpu {H200} --config qwen3-0.6b --width 512", ("config and width", "either")),
    "bad heads": (
        f"predict --gpu {H200} --width 768 --heads 6 --kv-heads 4", ("heads 6", "kv_heads 4", "1, 2, 3, 6")),
    "config and depth law": (
        f"predict --gpu {H200} --config qwen3-0.6b --depth-law ln", ("config and depth_law", "either", "depth")),
    "a plan of a config by a depth law": (
        "plan --config qwen3-0.6b --depth-law ln", ("config and depth_law", "either", "depth")),
    "a plan of tokens said twice": (
        "plan --config qwen3-0.6b --tokens 1B --tokens-per-param 5", ("--tokens with --tokens-per-param", "one of")),
    "a plan of a model and a ladder": ("plan --config qwen3-0.6b --widths 256,512", ("--widths", "--budget-usd")),
    "a ladder of one depth": ("plan --budget-usd 100 --depth 4", ("--depth 4", "--config or --width")),
    "zero width": (f"predict --gpu {H200} --width 0", ("width is 0", SIZES)),
    "negative width": (f"predict --gpu {H200} --width -512", ("width is -512", SIZES)),
    "text as width": (f"predict --gpu {H200} --width wide", ("--width", "integer")),
    **{
        f"zero {name}": (f"predict --gpu {H200} --width 512 --{name.replace('_', '-')} 0", (name, " 0", SIZES))
        for name in ("depth", "heads", "kv_heads", "head_dim", "ffn", "vocab", "batch", "seq", "accumulate")
    },
    "more layers than any model": (
        f"predict --gpu {H200} --width 512 --depth 1001", ("depth (num_hidden_layers) is 1001", "at most 1000")),
    "a config of too many layers": (
        f"predict --gpu {H200} --config gpt2 --depth 100000", ("depth (n_layer) is 100000", "at most 1000")),
    "negative batch": (f"predict --gpu {H200} --width 512 --batch -4", ("batch is -4", SIZES)),
    "odd head_dim": (f"predict --gpu {H200} --width 512 --head-dim 127", ("head_dim 127", "even")),
    "under one layer": (
        f"predict --gpu {H200} --width 8", ("'printed'", "0 layers", "width 8", "larger width", "--depth")),
    "under one layer by ln": (f"predict --gpu {H200} --width 8 --depth-law ln", ("'ln'", "0 layers", "width 8")),
    "unknown depth law": (f"predict --gpu {H200} --width 512 --depth-law deep", ("'deep'", "printed, ln, qwen3")),
    "zero layers of a config": (f"predict --gpu {H200} --config qwen3-0.6b --depth 0", ("depth", "0", SIZES)),
    # runs
    "unknown precision": (
        f"predict --gpu {H200} --width 512 --precision fp8",
        ("'fp8'", "autocast-fp16, bf16", "no layer that trains in it"),
    ),
    "unknown optimizer": (f"predict --gpu {H200} --width 512 --optimizer lion", ("'lion'", "adamw, adamw-fused")),
    "unknown mode": (f"predict --gpu {H200} --width 512 --mode quick", ("'quick'", "eager, compile")),
    "a compiler that times": (f"predict --gpu {H200} --width 512 --mode max-autotune", ("'max-autotune'", "timing")),
    "another compiler": (f"predict --gpu {H200} --width 512 --mode cudagraphs", ("'cudagraphs'", "inductor")),
    "fused kernels compiled": (
        f"predict --gpu {H200} --width 512 --mode compile --fused triton", ("fused", "'triton'", "fuses")),
    "all modes of a module": (
        "cost --all-modes --module flopcast.microbench.zoo:mlp", ("--all-modes", "--module", "--mode")),
    "the compiled forward alone": (
        f"widths --gpu {H200} --around 512 --mode compile --forward-only", ("--forward-only", "'compile'")),
    "how far of compiled widths": (
        f"widths --gpu {H200} --around 512 --mode compile --span 192", ("--span 192", "compile", "leave it out")),
    "compiled on the processor": ("predict --gpu cpu --width 512 --mode compile", ("'compile'", "'cpu'", "eager")),
    "no micro-batch": (f"predict --gpu {H200} --width 512 --accumulate 0", ("accumulate is 0", "at least 1")),
    "unknown checkpointing": (f"predict --gpu {H200} --width 512 --checkpoint half", ("'half'", "none, full")),
    "no such module": (f"predict --gpu {H200} --module no_such:f", ("'no_such:f'", "No module named", "PYTHONPATH")),
    "no such factory": (
        f"predict --gpu {H200} --module flopcast.microbench.zoo:vit", ("vit does not exist", "resnet50", "vit_b16")),
    "a module with a width": (f"predict --gpu {H200} --module a.b:c --width 512", ("--module", "--width", "one of")),
    "explain of a module with a width": (
        f"explain --gpu {H200} --module a.b:c --width 512", ("--module", "--width", "one of")),
    "a module that exits": (f"predict --gpu {H200} --module leaves:f", ("leaves", "failed", "SystemExit")),
    "a module with an empty batch": (
        f"predict --gpu {H200} --module hollow:none", ("hollow:none", "batch is empty", "one sample")),
    "a module and a batch that do not fit": (
        f"predict --gpu {H200} --module hollow:odd", ("hollow:odd cannot be traced", "[4, 65]", "aten.addmm")),
    "a size that the factory does not take": (
        f"predict --gpu {H200} --module fixed:five --seq 7", ("--seq 7", "fixed:five", "no parameter 'seq'")),
    "explain of a size that the factory does not take": (
        f"explain --gpu {H200} --module fixed:five --batch 7", ("--batch 7", "no parameter 'batch'")),
    "a module whose factory takes no batch": (
        f"predict --gpu {H200} --module fixed:five --largest-batch", ("fixed:five", "batch of 2", "one of 5")),
    "unknown matmul": (f"predict --gpu {H200} --width 512 --matmul mkl", ("'mkl'", "torch, triton")),
    "unknown attention": (f"predict --gpu {H200} --width 512 --attention flex", ("'flex'", "sdpa-flash")),
    # prices
    "negative price": (f"predict --gpu {H200} --width 512 --price {H200}=-1", ("'-1'", "above zero")),
    "price next to nothing": (f"predict --gpu {H200} --width 512 --price {H200}=1e-300", ("'1e-300'", "0.0001 to")),
    "price of a GPU not asked for": (
        f"predict --gpu {H200} --width 512 --price nvidia-l4=3", ("nvidia-l4=3", f"asked for ({H200})")),
    "price of nothing": (f"predict --gpu {H200} --width 512 --price 3.99", ("'3.99'", "GPU=USD_PER_HOUR")),
    "price that is none": (f"predict --gpu {H200} --width 512 --price {H200}=nan", ("'nan'", "above zero")),
    "price of an unknown GPU": (f"predict --gpu {H200} --width 512 --price h300=1", ("'h300'", "nvidia-h200")),
    "negative price in a book": (
        f"predict --gpu {H200} --width 512 --prices prices.csv", ("prices.csv line 2", "'-3'", "above zero")),
    "missing price book": (f"predict --gpu {H200} --width 512 --prices no.csv", ("no.csv", "does not exist")),
    "bad day": (f"predict --gpu {H200} --width 512 --on yesterday", ("'yesterday'", "YYYY-MM-DD")),
    "unknown provider": (f"predict --gpu {H200} --width 512 --provider acme", ("'acme'", "RunPod Secure Cloud")),
    # cost
    "unknown GPU of several": (f"cost --gpus {H200},h300 --widths 512", ("'h300'", "nvidia-l4", *MEASURE)),
    "no GPU": ("cost --gpus , --widths 512", ("no GPU", "flopcast gpus")),
    "widths that are none": ("cost --widths 512,wide", ("--widths", "'512,wide'", "integers")),
    "no widths": ("cost --widths ,", ("--widths", "','", "integers")),
    "cost under one layer": ("cost --widths 8,512", ("0 layers", "width 8")),
    "cost by an unknown law": ("cost --depth-law deep", ("'deep'", "printed, ln, qwen3")),
    "cost with a bad optimizer": ("cost --widths 512 --optimizer lion", ("'lion'", "adamw-fused")),
    "an unknown way to tune": (
        f"predict --gpu {H200} --width 512 --finetune prefix", ("'prefix'", "full, lora, qlora and last=N"),
    ),
    "qlora in fp32": (
        f"predict --gpu {H200} --width 512 --finetune qlora --precision fp32", ("'qlora'", "--precision autocast-bf16"),
    ),
    "no last layers": (f"predict --gpu {H200} --width 512 --finetune last=0", ("'last=0'", "from 1 on")),
    "a rank without adapters": (f"predict --gpu {H200} --width 512 --lora-rank 8", ("lora_rank 8", "lora and qlora")),
    "an unknown base": (f"predict --gpu {H200} --width 512 --base-dtype int2", ("'int2'", "bf16, fp8, int8, int4")),
    "a base of eight bits": (f"predict --gpu {H200} --width 512 --base-dtype int8", ("'int8'", "--phase prefill")),
    "weights of four bits in fp32": (
        f"predict --gpu {H200} --width 512 --phase decode --context 9 --base-dtype int4 --precision fp32",
        ("'int4'", "'fp32'", "--precision bf16"),
    ),
    "weights of four bits by Triton": (
        f"predict --gpu {H200} --width 512 --phase decode --context 9 --base-dtype int4 --matmul triton",
        ("'int4'", "'triton'", "torch's own products"),
    ),
    "weights of four bits of a width": (
        f"predict --gpu {H200} --width 576 --phase decode --context 9 --base-dtype int4",
        ("q_proj has 576 inputs", "multiples of 128"),
    ),
    "weights of four bits on several GPUs": (
        f"predict --gpu {H200} --width 512 --phase decode --context 9 --base-dtype int4 --parallel tp=2",
        ("parallel tp=2", "one of the two"),
    ),
    "weights in fp8 before there was fp8": (
        "predict --gpu nvidia-a100-80gb-sxm --width 512 --phase decode --context 9 --base-dtype fp8",
        ("'fp8'", "compute capability 8.0", "from 8.9 on"),
    ),
    "a module that is tuned": (
        f"predict --gpu {H200} --module flopcast.microbench.zoo:mlp --finetune lora", ("finetune lora", "factory"),
    ),
    "no ways": (f"finetune --gpu {H200} --config qwen3-0.6b --ways ,", ("full, last=N, lora",)),
    "only a way that is refused": (f"finetune --gpu {H200} --config qwen3-0.6b --ways last=99", ("28 layers",)),
    "an unknown phase": (f"predict --gpu {H200} --width 512 --phase serve", ("'serve'", "train, prefill, decode")),
    "a phase without a context": (f"predict --gpu {H200} --width 512 --phase decode", ("context is 0", "--context")),
    "a context without a phase": (f"predict --gpu {H200} --width 512 --context 9", ("context 9 without a phase",)),
    "an optimizer of a decode": (
        f"predict --gpu {H200} --width 512 --phase decode --context 9 --optimizer sgd",
        ("optimizer sgd", "trains nothing"),
    ),
    "a compiled decode of a cache that grows": (
        f"predict --gpu {H200} --width 512 --phase decode --context 9 --mode compile --cache dynamic",
        ("cache 'dynamic' with mode 'compile'", "--cache static"),
    ),
    "a decode on several GPUs": (
        f"predict --gpu {H200} --width 512 --phase decode --context 9 --parallel ddp=2", ("decode", "not modelled yet"),
    ),
    "a phase of a module": (
        f"predict --gpu {H200} --module flopcast.microbench.zoo:mlp --phase prefill --context 9",
        ("phase prefill of a module", "without a backward"),
    ),
    "a negative clip": (f"predict --gpu {H200} --width 512 --clip -1", ("clip is -1", "0 for no clipping")),
    "clip not a number": (f"predict --gpu {H200} --width 512 --clip nan", ("clip is nan",)),
    "compiled beside bitsandbytes": (
        f"predict --gpu {H200} --width 512 --depth 2 --optimizer adamw8bit --mode compile",
        ("'adamw8bit'", "'compile'", "adamw-fused"),
    ),
    "flopcast's AdamW of weights in bf16": (
        f"predict --gpu {H200} --width 512 --depth 2 --optimizer adamw-triton --precision bf16",
        ("'adamw-triton'", "precision 'bf16'", "adamw-fused"),
    ),
    "flopcast's AdamW on a processor": (
        "predict --gpu cpu --width 512 --optimizer adamw-triton", ("adamw-triton on processors", "adamw-fused"),
    ),
    "flopcast's AdamW of divided parameters": (
        f"predict --gpu {H200} --width 512 --depth 2 --optimizer adamw-triton --parallel fsdp=2",
        ("'adamw-triton'", "parallel fsdp=2", "adamw-fused"),
    ),
    "clipping where layers are divided": (
        f"predict --gpu {H200} --width 512 --depth 2 --clip 1 --parallel tp=2", ("clip 1.0", "tp=2", "clip_grad_norm_"),
    ),
    "adapters where layers are divided": (
        f"predict --gpu {H200} --width 512 --depth 2 --finetune lora --parallel tp=2",
        ("finetune lora", "tp=2", "fsdp"),
    ),
    "4 bits on several GPUs": (
        f"predict --gpu {H200} --width 512 --depth 2 --finetune qlora --parallel fsdp=2",
        ("'qlora'", "fsdp=2", "ddp=N"),
    ),
    "cost into a file": (f"cost --gpus {H200} --widths 512 --out plain/new", ("plain/new", "cannot be written")),
    # CSV
    **{
        f"{command} of a missing file": (
            f"{command} --gpu {H200} --from no.csv --out out.csv", ("no.csv", "cannot be read", "CSV"))
        for command in ("sweep", "kernels")
    },
    **{
        f"{command} of an empty file": (
            f"{command} --gpu {H200} --from empty.csv --out out.csv", ("empty.csv", "empty", "header"))
        for command in ("sweep", "kernels")
    },
    **{
        f"{command} of a table with an open quote": (
            f"{command.format('quote.csv')}", ("quote.csv line 2", "a quote is opened", "line 3"))
        for command in TABLES
    },
    **{
        f"{command} of a table without rows": (f"{command.format('header.csv')}", ("header.csv", "no rows"))
        for command in TABLES
    },
    **{
        f"{command} of a table in another encoding": (
            f"{command.format('latin.csv')}", ("latin.csv line 3", "0xfc", "UTF-8"))
        for command in TABLES
    },
    "prices in another encoding": ("prices --prices latin.toml", ("latin.toml line 2", "0xfc", "UTF-8")),
    "a config in another encoding": (
        f"predict --gpu {H200} --config latin.json", ("latin.json line 2", "0xfc", "UTF-8")),
    "sweep with a misspelt column": (
        f"sweep --gpu {H200} --from typo.csv --out out.csv", ("typo.csv", "bach", "batch", "kv_heads")),
    "sweep with a column twice": (f"sweep --gpu {H200} --from twice.csv --out out.csv", ("'width'", "twice")),
    "kernels with a misspelt column": (
        f"kernels --gpu {H200} --from kernels-typo.csv --out out.csv", ("layuot", "layout", "head_dim")),
    "sweep into a file": (f"sweep --gpu {H200} --from steps.csv --out plain/out.csv", ("plain/out.csv", "--out")),
    "sweep into a folder": (f"sweep --gpu {H200} --from steps.csv --out .", ("--out '.'", "is a folder")),
    "cost into a file itself": (f"cost --gpus {H200} --widths 512 --out plain", ("--out 'plain'", "is a file")),
    "import into a folder": (
        "import header.csv --gpu nvidia-l4 --source me --out .", ("--out '.'", "is a folder")),
    "fit into a folder": ("fit nowhere --out .", ("--out '.'", "is a folder")),
    "kernels into /proc": (f"kernels --gpu {H200} --from shapes.csv --out /proc/no/out.csv", ("/proc/no", "--out")),
    "sweep on an unknown GPU": ("sweep --gpu h300 --from steps.csv --out out.csv", ("'h300'", *MEASURE)),
    "kernels on an unknown GPU": ("kernels --gpu h300 --from shapes.csv --out out.csv", ("'h300'", *MEASURE)),
    # measuring
    "unknown suite": ("bench --device cpu --suite tiny", ("'tiny'", "quick, standard")),
    "unknown device": ("bench --device tpu", ("'tpu'", "cuda, cuda:N, cpu")),
    "negative budget": ("bench --device cpu --budget -1", ("--budget", "-1", "0 or more")),
    "bench into a file": ("bench --device cpu --out plain/new", ("plain/new", "cannot be written", "--out")),
    "fit of nothing": ("fit nowhere", ("nowhere", "does not exist", "flopcast bench --out nowhere")),
    "validate by an unknown suite": ("validate --suite tiny", ("'tiny'", "quick, standard")),
    "validate an unknown GPU": ("validate --device cpu --gpu h300", ("'h300'", *MEASURE)),
    "validate without a profile": ("validate --device cpu", ("processor", *MEASURE)),
    "validate another's profile": (f"validate --device cpu --gpu {H200}", (H200, "cuda", "cpu", *MEASURE)),
    "validate another GPU's steps": (
        f"validate --steps-from {STEPS} --gpu nvidia-l4", ("NVIDIA H200", "profile nvidia-l4", "--any-gpu")),
    "report on another GPU's steps": (
        f"report --gpu nvidia-l4 --steps {STEPS}", ("NVIDIA H200", "profile nvidia-l4", "--gpu")),
    "validate steps from nowhere": (f"validate --steps-from nowhere --gpu {H200}", ("nowhere", "flopcast validate")),
    "report on nothing": ("report", ("--measure", "--gpu", "--measurements")),
    "report on an unknown GPU": ("report --gpu h300", ("'h300'", *MEASURE)),
    "report into a file": (f"report --gpu {H200} --out plain/rep", ("plain/rep", "cannot be written", "--out")),
    "report of steps from nowhere": (f"report --gpu {H200} --steps nowhere", ("nowhere", "flopcast validate")),
    "report of missing measurements": ("report --measurements nowhere --out .", ("nowhere", "flopcast bench")),
    "report of a GPU and another's measurements": (
        f"report --gpu nvidia-l4 --measurements {MEASURED}", ("--gpu nvidia-l4", "are of nvidia-h200", "leave one")),
    "report of this machine and of another": (
        f"report --measure --gpu {H200}", ("--gpu nvidia-h200 with --measure", "leave it out")),
    "report of this machine and of measurements": (
        f"report --measure --measurements {MEASURED}", ("--measurements", "with --measure", "leave it out")),
    "report with a device of its own": (f"report --gpu {H200} --device cpu", ("--device cpu without --measure",)),
    "report with a suite that is not run": (f"report --gpu {H200} --suite quick", ("--suite quick without",)),
    "report with an index in a file": (f"report --gpu {H200} --index plain", ("--index 'plain'", "no folder")),
    "widths on a ground without a figure": (
        f"widths --gpu {H200} --around 512 --theme dark", ("--theme dark without --figure",)),
    "widths of another kind of model": (
        f"widths --gpu {H200} --config gpt2",
        ("model_type 'gpt2' (not a dense decoder whose config says all six dimensions)", "qwen3, llama, mistral")),
    "roofline of a dtype without a figure": (f"roofline --gpu {H200} --dtype fp32", ("--dtype fp32 without --out",)),
    "roofline of a ground without a figure": (f"roofline --gpu {H200} --theme dark", ("--theme dark without --out",)),
    "roofline into a folder": (f"roofline --gpu {H200} --out folder.png", ("'folder.png'", "is a folder")),
    "roofline below a file": (f"roofline --gpu {H200} --out plain/new.png", ("'plain/new.png'", "is no folder")),
    "fit of a file": ("fit plain", ("plain is a file", "flopcast bench")),
    "prices of an alias in no catalogue": (
        "prices --alias A100=nvidia-a100-80gb-pcie", ("--alias", "without --from or --refresh")),
    **{
        f"validate of steps that have run with {option}": (
            f"validate --steps-from {STEPS} --gpu {H200} {option}", (f"{option} with --steps-from",))
        for option in ("--device cpu", "--suite quick", "--retry", "--budget 3.0")
    },
    **{
        f"validate without comparing with {option}": (
            f"validate --run-only {option}", (f"{option} with --run-only", "nothing is compared"))
        for option in (f"--gpu {H200}", "--any-stack", "--any-gpu")
    },
    "roofline of an unknown GPU": ("roofline --gpu h300", ("'h300'", *MEASURE)),
    "unknown command": ("forecast", ("forecast",)),
    "unknown option": (f"predict --gpu {H200} --widht 512", ("--widht",)),
    "option left out": ("predict --width 512", ("--gpu",)),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, holding FILES; nobody's cache."""
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "user_folder", lambda: tmp_path / "no-profiles")
    return tmp_path


@pytest.mark.parametrize("case", BAD_USE)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_bad_use_is_refused_with_a_message(flopcast: Command, folder: Path, case: str, as_json: bool) -> None:
    command, said = BAD_USE[case]
    before = _files_in(folder)
    result = flopcast(*command.split(), *(["--json"] if as_json else []))
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert len(result.err) < 1500
    message = result.err if "Usage:" in result.err else " ".join(result.err.split())
    assert [part for part in said if part not in message] == []
    assert _files_in(folder) == before, "something was written"


def _files_in(folder: Path) -> list[Path]:
    """All but what Python keeps of a module that it imports."""
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__")


def test_a_device_that_is_not_there_is_named_and_the_processor_offered(flopcast: Command, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for command in ("bench", "validate"):
        result = flopcast(command, "--device", "cuda")
        assert (result.code, result.out) == (2, "")
        assert "CUDA" in result.err
        assert "--device cpu" in result.err
    assert not (folder / "out").exists()


def test_a_process_exits_0_with_its_answer_and_2_with_a_message() -> None:
    good = process("gpus", "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert H200 in good.stdout
    bad = process("predict", "--gpu", "h300", "--width", "512")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("flopcast: unknown GPU 'h300'")
    assert len(bad.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_ends_it_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "flopcast", "gpus", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert b"Traceback" not in running.stderr.read()
        assert running.wait(60) in (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [("gpus",), ("gpus", "--hosts", "--json"), ("predict", "--help")])
def test_a_full_disk_behind_it_is_told_in_a_line(arguments: Sequence[str]) -> None:
    with Path("/dev/full").open("w") as full:
        left = subprocess.run(
            [sys.executable, "-m", "flopcast", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (left.returncode, left.stderr) == (1, "flopcast: No space left on device\n")


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (RunError("no room to write x"), 1, "flopcast: no room to write x\n"),
        (KeyboardInterrupt(), 130, "flopcast: stopped\n"),
    ],
)
def test_what_fails_although_it_was_asked_well_exits_1(
    flopcast: Command, monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int, said: str
) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr(profiles, "known", fail)
    result = flopcast("gpus")
    assert (result.code, result.out, result.err) == (code, "", said)


def test_version_and_help(flopcast: Command) -> None:
    assert flopcast("--version").out.startswith("flopcast 0")
    helped = flopcast("--help")
    assert helped.code == 0
    for command in ("bench", "fit", "gpus", "predict", "sweep", "kernels", "validate", "cost", "roofline", "report"):
        assert command in helped.out
        assert flopcast(command, "--help").code == 0


def test_a_document_is_printed_whole_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.emit({"first": 1, "second": math.nan})
    assert capsys.readouterr().out == ""
