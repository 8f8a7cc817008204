"""Tuning of attention's tiles: what is tried, on what, and that plans run what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attention_batches import make_batch, make_mla_batch
from triton_batches import DEVICE, moved, moved_cache

from attention import (
    AttentionShape,
    KVCacheSpec,
    MLACacheSpec,
    MLAKVCache,
    MLAShape,
    PagedKVCache,
    make_attention_backend,
)
from attention.kernels import tuning
from attention.kernels.decode import DecodeSplits

pytestmark = pytest.mark.triton

QWEN, DEEPSEEK = AttentionShape(32, 4, 128), MLAShape(128, 512, 128, 64, 128)
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices as on a GPU."""
    made = (tuning.decode_choices, tuning.prefill_choices, tuning.latent_choices)
    for function in made:
        function.cache_clear()
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr("attention.kernels.tile.INTERPRETED", False)
    monkeypatch.setattr("attention.kernels.latent.INTERPRETED", False)
    yield
    for function in made:
        function.cache_clear()


class Tuner:
    """Runs every config, as on a GPU, and chooses the last."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.tried: list[Any] = []

    def __call__(
        self, key: str, configs: Sequence[Any], run: Callable[[Any], object], *, device: torch.device, **_: Any
    ) -> Any:
        self.keys.append(key)
        for config in configs:
            run(config)
            self.tried.append(config)
        return configs[-1]


@pytest.mark.usefixtures("compiled")
def test_the_default_comes_first_and_nothing_comes_twice() -> None:
    decode = tuning.decode_choices(QWEN, 1, BF16, fp8=False)
    prefill, latent = tuning.prefill_choices(QWEN, BF16), tuning.latent_choices(DEEPSEEK, 1, BF16, fp8=False)
    assert decode[0] == tuning.DecodeChoice(keys=64, num_warps=4, num_stages=3, waves=2)
    assert prefill[0] == tuning.TileSize.prefill(QWEN, BF16)
    assert latent[0] == tuning.LatentChoice(rows=64, keys=32, num_warps=8, num_stages=3, waves=1)
    for choices in (decode, prefill, latent):
        assert len(set(choices)) == len(choices) > 4
    assert len(tuning.decode_choices(QWEN, 1, torch.float32, fp8=False)) == 1


def test_nothing_is_tried_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "autotune", lambda *args, **kwargs: pytest.fail("asked"))
    cache = PagedKVCache(KVCacheSpec(1, 2, 8), 4, DEVICE)
    if DEVICE == "cpu":
        assert tuning.tune_decode(AttentionShape(4, 2, 8), cache, 1, 1, 64, 8).num_warps == 4


@pytest.mark.usefixtures("compiled")
def test_kinds_of_batches_share_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By requests up to a power of two, and by few classes of lengths; other shapes, pages and dtypes do not."""
    keys: list[str] = []
    monkeypatch.setattr(tuning, "autotune", lambda key, configs, run, **_: keys.append(key) or configs[0])

    def key(requests: int, length: int, queries: int = 1, shape: AttentionShape = QWEN, **options: Any) -> str:
        spec = shape.cache_spec(1, options.pop("pages", 16), BF16, **options)
        tuning.tune_decode(shape, PagedKVCache(spec, 1), requests, queries, length, 132)
        return keys[-1]

    assert key(65, 2000) == key(128, 600) != key(64, 2000)
    assert key(64, 9000) == key(64, 40000) != key(64, 2000)
    others = [
        key(64, 2000, 2),
        key(64, 2000, pages=64),
        key(64, 2000, fp8=True),
        key(64, 2000, shape=AttentionShape(32, 8, 128)),
        key(64, 2000, shape=AttentionShape(32, 4, 128, sliding_window=512)),
        key(64, 2000, shape=AttentionShape(32, 4, 128, soft_cap=5.0)),
    ]
    assert len({key(64, 2000), *others}) == 7


@pytest.mark.skipif(DEVICE != "cpu", reason="the tiles tried here are too small for a GPU")
def test_every_choice_is_run_on_the_cache_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And plans take the one that was chosen."""
    tuner = Tuner()
    monkeypatch.setattr(tuning, "autotune", tuner)
    monkeypatch.setattr(tuning, "_LENGTHS", (48,))
    monkeypatch.setattr(tuning, "_PREFILL_TOKENS", 40)
    tiles = [tuning.DecodeChoice(16, 4, 1, waves) for waves in (1, 2)]
    sizes = [tuning.TileSize(16, keys, 16, 4, 1) for keys in (16, 32)]
    latent = [tuning.LatentChoice(16, keys, 4, 1, 1) for keys in (16, 32)]
    monkeypatch.setattr(tuning, "decode_choices", lambda *args, **options: tiles)
    monkeypatch.setattr(tuning, "prefill_choices", lambda *args: sizes)
    monkeypatch.setattr(tuning, "latent_choices", lambda *args, **options: latent)

    batch = make_batch([(40, 1), (0, 9), (3, 1)])
    cache = moved_cache(batch)
    before = cache.key_pool.memory.clone(), cache.value_pool.memory.clone()
    plan: Any = make_attention_backend("triton", batch.shape, cache).plan(moved(batch.metadata))
    assert tuner.tried == [*tiles, *sizes]
    assert torch.equal(cache.key_pool.memory, before[0])
    assert torch.equal(cache.value_pool.memory, before[1])
    assert plan.tile_size == sizes[-1]
    assert plan.splits == DecodeSplits(1, plan.splits.num_splits, tiles[-1].tile(batch.shape, 1))
    out = plan.forward(batch.q, batch.k, batch.v, 0)
    torch.testing.assert_close(out, batch.expected(), atol=1e-5, rtol=1e-5)

    tuner.tried.clear()
    mla = make_mla_batch([(40, 1), (3, 1)])
    latents = mla.new_cache()
    stored = latents.pool.memory.clone()
    mla_plan: Any = make_attention_backend("triton", mla.shape, latents).plan(mla.metadata)
    assert tuner.tried == latent
    assert torch.equal(latents.pool.memory, stored)
    assert mla_plan.absorbed.tile == latent[-1]
    torch.testing.assert_close(mla_plan.forward(mla.inputs, 0), mla.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_tuning_on_a_gpu_writes_its_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All choices of all three kernels compile and run, and what is chosen is found again."""
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(tmp_path / "autotune.json"))
    cache = PagedKVCache(KVCacheSpec(1, 4, 128, dtype=BF16), 512, "cuda")
    latents = MLAKVCache(MLACacheSpec(1, 512, 64, block_size=64, dtype=BF16), 128, "cuda")
    chosen = [
        (
            tuning.tune_decode(QWEN, cache, 64, 1, 2000, 132),
            tuning.tune_prefill(QWEN, cache),
            tuning.tune_latent_decode(DEEPSEEK, latents, 16, 1, 2000, 132),
        )
        for _ in range(2)
    ]
    assert chosen[0] == chosen[1]
    text = (tmp_path / "autotune.json").read_text()
    assert all(name in text for name in ("decode attention", "prefill attention", "latent decode"))
