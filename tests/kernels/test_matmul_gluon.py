"""The matmul in Gluon: what ptxas makes of it, by compiling without a GPU; exact products, on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from flopcast.kernels import matmul, matmul_law
from flopcast.kernels.matmul_configs import GLUON, MatmulConfig, from_key, shared_memory_limit
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.tuning.check import small_integers

TILES = [config for config in matmul_law.fitted().tiles if config.kind in GLUON]
SPLIT = [replace(config, split=3, reduce=True) for config in TILES if config.kind == "gluon"]
# One of each: two accumulators, three groups, groups apart, in turn, A in registers; a row of C in halves; parts of k
COMPILED = (
    "nt/gluon/128x192x64/w8s4/g8/k1/c1p1",
    "tn/regs/192x192x64/w12s3/g8/k1/c1p1",
    "nn/drift/128x256x64/w8s4/g8/k1/c2p1",
    "tn/turns/128x192x64/w8s4/g8/k1/c2p1",
    "nn/gluon/192x192x64/w12s3/g8/k4r/c1p1",
)


def test_products_run_side_by_side_and_nothing_spills(run_script: Callable[..., str]) -> None:
    pytest.importorskip("triton.experimental.gluon")
    with ThreadPoolExecutor(2) as pool:
        printed = pool.map(lambda some: run_script("compile_matmul_gluon.py", *some), (COMPILED[:2], COMPILED[2:]))
        rows = [json.loads(line) for text in printed for line in text.splitlines()]
    assert {f"{row['layout']}/{row['key']}" for row in rows} == set(COMPILED)
    for row in rows:
        config = from_key(row["key"])
        groups = config.num_warps // 4
        assert row["spill_bytes"] == 0, row
        assert row["registers"] * 32 * 4 * (groups + 1) <= 65536, row
        assert row["shared_bytes"] <= shared_memory_limit((9, 0)), row
        assert row["shared_bytes"] <= config.shared_bytes(2) + 256, row  # what decides whether a tile is tried
        assert row["serialised"] == 0, row
        # a wait a step and one at a tile's end; a product every 16 of k, 64 rows and block of columns
        assert row["waits"] == 2 * groups, row
        rows_of_64 = config.block_m // 64 // (1 if config.kind == "turns" else groups)
        blocks_of_columns = 2 if config.block_n == 192 else 1
        assert row["products"] == groups * rows_of_64 * blocks_of_columns * config.block_k // 16, row


@pytest.mark.parametrize("key", ["turns/64x128x64/w8s6/g16/k4r/c1p1", "gluon/128x96x64/w8s6/g8/stream/c1p1"])
def test_a_split_that_it_cannot_make_is_refused(key: str) -> None:
    """On a device its groups would wait for one another without end."""
    kernels = pytest.importorskip("flopcast.kernels.triton_matmul_gluon")
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="only kind 'gluon' does"):
        kernels.launch(x, x, "nt", 128, 128, 128, from_key(key), 132)


def test_its_tiles_fit_the_part() -> None:
    assert {config.kind for config in TILES} == set(GLUON)
    assert all(config.shared_bytes(2) <= shared_memory_limit((9, 0)) for config in TILES)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs an sm_90 GPU"
)
class TestOnDevice:
    # fewer tiles than groups, k of less than a ring; odd ends; several tiles a program
    @pytest.mark.parametrize("size", [(64, 8, 8), (392, 520, 712), (4104, 3080, 136), (1856, 320, 5696)])
    @pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
    def test_small_integers_multiply_exactly(
        self, at_once: Callable[..., list[torch.Tensor]], layout: str, size: tuple[int, int, int]
    ) -> None:
        self.exact(at_once, layout, size, torch.bfloat16, [*TILES, *SPLIT])

    @pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
    def test_fp16_multiplies_exactly(self, at_once: Callable[..., list[torch.Tensor]], layout: str) -> None:
        of_each_kind = {config.kind: config for config in TILES}
        assert set(of_each_kind) == set(GLUON)
        self.exact(at_once, layout, (392, 520, 712), torch.float16, tuple(of_each_kind.values()))

    def exact(
        self,
        at_once: Callable[..., list[torch.Tensor]],
        layout: str,
        size: tuple[int, int, int],
        dtype: torch.dtype,
        configs: Sequence[MatmulConfig],
    ) -> None:
        shape = Gemm(m=size[0], n=size[1], k=size[2], layout=layout)
        a, b = (x.to(dtype) for x in small_integers(shape, "cuda"))
        exact = matmul.matmul_torch(a.float(), b.float(), layout).to(dtype)
        torch.cuda.synchronize()

        def product(config: MatmulConfig) -> torch.Tensor:
            return matmul.matmul_triton(a, b, layout, config=config)

        first = at_once(partial(product, config) for config in configs)
        for config, out in zip(configs, first, strict=True):
            assert out.dtype == dtype
            for again in (out, product(config), product(config)):
                assert torch.equal(again, exact), config.key

    def test_a_result_that_copies_cannot_write_is_written(self) -> None:
        shape = Gemm(m=256, n=192, k=128)
        a, b = small_integers(shape, "cuda")
        out = torch.empty(256 * 192 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(256, 192)
        found = matmul.matmul_triton(a, b, "nt", config=TILES[0], out=out)
        assert found.data_ptr() == out.data_ptr()
        assert torch.equal(out, matmul.matmul_torch(a.float(), b.float(), "nt").bfloat16())
