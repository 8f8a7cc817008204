"""Which dtype a checkpoint in bfloat16 gets on a CPU: the faster one, measured on its own sizes."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from c_kernels import needs_c
from checkpoints import make_checkpoint

import model_runner.auto.cpu_dtype as cpu_dtype
from model_runner import Checkpoint, ModelConfig, fastest_cpu_dtype
from model_runner.auto.cpu_dtype import _measure, _Sizes
from model_runner.decoder.layers import Attention, GatedMLP
from model_runner.models.registry import read_model
from model_runner.parallel.tensor_parallel import Shard
from ubatch import ConfigError
from ubatch.kernels import candidates

FAMILIES = ("Qwen3Moe", "Mixtral", "DeepseekV3", "Llama")


def config_of(path: Path) -> ModelConfig:
    return read_model(Checkpoint(path))[1]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: config_of(make_checkpoint(folder / family, family)) for family in FAMILIES}


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    _measure.cache_clear()
    yield
    _measure.cache_clear()


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((1.0, 2.0), "bfloat16"),
        ((1.0, 1.12), "bfloat16"),
        ((1.0, 1.05), "float32"),  # within the noise
        ((2.0, 1.0), "float32"),
    ],
)
def test_the_faster_one_is_taken(
    times: tuple[float, float], chosen: str, configs: dict[str, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "_best_times", lambda ways, _: [*times] * (len(ways) // 2))
    name, reason = fastest_cpu_dtype(configs["Qwen3Moe"])
    assert name == chosen
    assert f"{times[1] / times[0]:.2f}x" in reason


def test_decode_and_prefill_have_equal_weight(configs: dict[str, ModelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a prefill takes longer."""

    def best_times(ways: Any, _: object) -> list[float]:
        rows = ways[0].args[0].shape[0]
        return ([4.0, 1.0] if rows <= 16 else [100.0, 200.0]) * (len(ways) // 2)

    monkeypatch.setattr(cpu_dtype, "_best_times", best_times)
    assert fastest_cpu_dtype(configs["Llama"])[0] == "float32"


def test_it_is_measured_once_with_the_kernels_of_the_model(
    configs: dict[str, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=cpu_dtype.make_experts)
    monkeypatch.setattr(cpu_dtype, "make_experts", made)
    assert fastest_cpu_dtype(configs["Mixtral"], "grouped") == fastest_cpu_dtype(configs["Mixtral"], "grouped")
    assert [call.args[0] for call in made.call_args_list] == ["grouped", "grouped"]
    expected = [cpu_dtype.fastest_cpu_experts(dtype, torch.device("cpu")) for dtype in cpu_dtype._DTYPES]
    fastest_cpu_dtype(configs["Mixtral"])
    assert [call.args[0] for call in made.call_args_list[2:]] == expected


@needs_c
def test_the_output_layer_is_measured_as_it_runs_and_on_a_ranks_threads(
    configs: dict[str, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    threads: set[int] = set()
    layer, best_times = cpu_dtype.NativeLinear, cpu_dtype._best_times
    monkeypatch.setattr(cpu_dtype, "NativeLinear", lambda weight: seen.append(tuple(weight.shape)) or layer(weight))
    monkeypatch.setattr(
        cpu_dtype, "_best_times", lambda *parts: threads.add(torch.get_num_threads()) or best_times(*parts)
    )
    config, own = configs["Llama"], torch.get_num_threads()
    fastest_cpu_dtype(config, "native", own + 1)
    assert seen.count((config.vocab_size, config.hidden_size)) == 2
    assert threads == {own + 1}
    assert torch.get_num_threads() == own


def test_experts_without_bfloat16_stay_in_float32(
    configs: dict[str, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "make_experts", Mock(side_effect=ConfigError("no bfloat16 here.")))
    found = fastest_cpu_dtype(configs["Qwen3Moe"], "mine")
    assert found == ("float32", "bfloat16 cannot be measured here: no bfloat16 here.")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_the_family_is_measured(family: str, configs: dict[str, ModelConfig]) -> None:
    config = configs[family]
    sizes = _Sizes.of(config)
    assert (sizes.experts is None) == (family == "Llama")
    assert len(sizes.projections) == (2 if family == "Mixtral" else 4)  # which has no dense MLP
    name, reason = fastest_cpu_dtype(config)
    assert reason.startswith("bfloat16 is ") == (name == "float32")
    assert "of 16 tokens" in reason
    assert "256 tokens" in reason


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Llama"])
def test_sizes_are_those_of_the_ranks_layers(
    family: str, ranks: int, configs: dict[str, ModelConfig], tmp_path: Path
) -> None:
    """Tensor parallelism: also where more ranks than key/value heads repeat them."""
    config: Any = configs[family]
    with closing(Checkpoint(make_checkpoint(tmp_path, family))) as checkpoint:
        parallel: Any = SimpleNamespace(shard=Shard(0, ranks), tensor=None)
        attention = Attention(config.attention, config, checkpoint, 1, parallel)
        sizes = (config.hidden_size, config.dense_intermediate_size)
        dense = GatedMLP(checkpoint, "model.layers.1.mlp", *sizes, shard=Shard(0, ranks))
    loaded = [attention.qkv, attention.out, dense.gate_up, dense.down]
    measured = [inputs * outputs for inputs, outputs in _Sizes.of(config, ranks).projections]
    assert measured == [each.num_weights for each in loaded]


def test_ranks_share_experts_and_not_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "_best_times", lambda ways, _: [1.0] * len(ways))

    def few(ranks: int, experts: tuple[int, int, int, int] | None) -> float:
        return _measure(_Sizes(((64, 64),), (64, 128), experts, 2, ranks), "grouped", 1)[0][0]

    others = few(1, None)
    assert few(4, None) == others == 1.5  # a projection, and of the logits a layer's half
    assert few(4, (8, 2, 64, 32)) - others == pytest.approx((few(1, (8, 2, 64, 32)) - others) / 4)


def test_a_decode_step_finds_its_weights_in_no_cache_or_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory is read before every round; of a model that fits in one dtype, those products run once more."""
    log: list[str] = []

    class Memory:
        def sum(self) -> None:
            log.append("read other memory")

    monkeypatch.setattr(cpu_dtype, "_ones", lambda dtype, size: Memory() if size * 4 == 1500 else None)
    monkeypatch.setattr(cpu_dtype, "_cache_bytes", lambda: 1000)
    monkeypatch.setattr(candidates, "_MOST_ROUNDS", 1)
    ways: Any = [lambda name=name: log.append(name) for name in ("bfloat16", "float32")]
    expected = {
        (False, False): ["read other memory", "bfloat16", "float32"],
        (True, False): ["read other memory", "bfloat16", "bfloat16", "float32"],
        (True, True): ["bfloat16", "float32"],
    }
    for fits, in_turn in expected.items():
        log.clear()
        cpu_dtype._best_times(ways, fits)
        assert log[2:] == in_turn  # each has run once before
    sizes = _Sizes(((5, 10), (10, 5)), (10, 20), (4, 2, 10, 5), 2)
    assert sizes.weights == 2 * (100 + 4 * 3 * 10 * 5) + 200
    for cache_bytes, fits in {1600 * 4 + 1: [True, True], 1600 * 4: [True, False], 1600 * 2: [False, False]}.items():
        monkeypatch.setattr(cpu_dtype, "_cache_bytes", lambda size=cache_bytes: size)
        assert cpu_dtype._fits(sizes) == fits


def test_the_last_cache_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "_CACHES", tmp_path)
    assert cpu_dtype._cache_bytes() == 32 << 20  # unknown
    for index, size in enumerate(("48K", "2048K", "107520K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cpu_dtype._cache_bytes() == 105 << 20
    (tmp_path / "index2" / "size").write_text("1048576K\n")
    assert cpu_dtype._cache_bytes() == 256 << 20
    (tmp_path / "index2" / "size").write_text("much\n")
    assert cpu_dtype._cache_bytes() == 32 << 20


LARGE = {
    "a wide dense model": _Sizes(((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)), (8192, 128256), None, 80),
    "wide experts": _Sizes(((4096, 6144), (4096, 4096)), (4096, 32000), (8, 2, 4096, 14336), 32),
    "many experts": _Sizes(((7168, 25152), (16384, 7168)), (7168, 129280), (256, 8, 7168, 2048), 61),
}


@pytest.mark.long
@pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
def test_large_models_are_measured_in_part(sizes: _Sizes) -> None:
    """In seconds even with both cores of a machine busy; and the estimate is of the whole layer."""
    cpu_dtype.fastest_cpu_experts(torch.bfloat16, torch.device("cpu"))
    cpu_dtype.fastest_cpu_experts(torch.float32, torch.device("cpu"))
    start = time.perf_counter()
    of_bfloat16, of_float32 = _measure(sizes, "auto", torch.get_num_threads())
    assert time.perf_counter() - start < 20.0
    operations = 2 * 256 * sum(inputs * outputs for inputs, outputs in sizes.projections)
    assert of_float32[1] > operations / 1e13  # no core computes faster
    assert of_float32[1] > of_float32[0] > 0
    assert of_bfloat16[1] > 0
