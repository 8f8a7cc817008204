"""`--dtype auto`: never less precise than the checkpoint, the same on all machines, and said."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import make_checkpoint
from repository import TINY_MOE

import serving.engine.rank.build as build
from model_runner import Checkpoint
from serving.cli import main
from serving.engine import EngineOptions
from serving.engine.rank.build import choose_dtype, read_checkpoint
from serving.engine.wire.agreement import describe_shape
from serving.engine.wire.rendezvous import Run, check_node, join_run, post_node
from serving.options import chosen_dtype, notes, resolve_keywords, to_engine_options
from ubatch import ConfigError

NODES = {"data_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1", "master_port": 29500, "device": "cpu"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """bfloat16 is faster here; for which experts' back ends, and ranks of a replica, that was asked."""
    asked: list[str] = []

    def fastest(_: object, experts_backend: str, threads: int | None, ranks: int) -> tuple[str, str]:
        asked.append(experts_backend if ranks == 1 else f"{experts_backend} on {ranks} ranks, {threads} thread")
        return "bfloat16", "it is 2x as fast"

    monkeypatch.setattr(build, "fastest_cpu_dtype", fastest)
    return asked


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [
        (("bfloat16",), "bfloat16"),
        (("float32",), "float32"),
        (("float16",), "float32"),  # which has more digits than bfloat16
        (("bfloat16", "float32"), "float32"),  # the config says one, the files are the other
        (("float32", "bfloat16"), "float32"),
        (("float8_e4m3fn",), "float32"),
        ((), "float32"),
    ],
)
def test_a_cpu_is_never_less_precise_than_the_checkpoint(
    stored: tuple[str, ...], chosen: str, measured: list[str]
) -> None:
    model = read_checkpoint(TINY_MOE)[0]
    name, why = choose_dtype("cpu", stored, model, "packed")
    assert name == chosen
    assert measured == ([] if chosen == "float32" else ["packed"])
    finer = next(dtype for dtype in (*stored, "unknown") if dtype != "bfloat16")
    assert chosen == "bfloat16" or f"the checkpoint is {finer}" in why


@pytest.mark.parametrize(("stored", "chosen"), [(("float16", "float32"), "float16"), ((), "bfloat16")])
def test_a_gpu_takes_what_the_config_says(stored: tuple[str, ...], chosen: str, measured: list[str]) -> None:
    assert choose_dtype("cuda", stored, read_checkpoint(TINY_MOE)[0])[0] == chosen
    assert not measured


CONFIGS: dict[str, tuple[Callable[[dict[str, object]], object], tuple[str, ...]]] = {
    "as it is": (lambda values: None, ("float16",)),
    "transformers 4": (lambda values: values.update(torch_dtype=values.pop("dtype")), ("float16",)),
    "none": (lambda values: values.pop("dtype"), ("float16",)),
    "another": (lambda values: values.update(dtype="bfloat16"), ("bfloat16", "float16")),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("change", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_what_a_checkpoint_stores(
    change: Callable[[dict[str, object]], object], expected: tuple[str, ...], sharded: bool, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "Qwen3", dtype=torch.float16, max_shard_size="40KB" if sharded else "5GB")
    file = path / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    assert Checkpoint(path).stored_dtypes() == expected
    for weights in path.glob("*.safetensors*"):
        weights.unlink()
    named = [str(each) for name, each in values.items() if name in ("dtype", "torch_dtype")]
    assert Checkpoint(path).stored_dtypes() == tuple(named)


def test_it_says_what_it_chose_and_an_explicit_one_is_obeyed(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = resolve_keywords(TINY_MOE, {"device": "cpu", "moe_backend": "grouped"})
    assert to_engine_options(settings).dtype == "bfloat16"
    assert chosen_dtype(settings) == ("--dtype auto is bfloat16: it is 2x as fast",)
    assert measured == ["grouped"]
    for name in ("float32", "float16", "bfloat16"):
        given = resolve_keywords(TINY_MOE, {"device": "cpu", "dtype": name})
        assert to_engine_options(given).dtype == name
        assert not chosen_dtype(given)
        assert any("no kernel here is made for it" in note for note in notes(given)) == (name == "float16")
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "moe_backend": "grouped"}
    resolve_keywords(TINY_MOE, {"device": "cpu", **ranks})
    assert measured == ["grouped", "grouped on 2 ranks, 1 thread"]
    assert main(["serve", str(TINY_MOE), "--device", "cpu", "--print-config"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("dtype:"))
    assert row.split() == ["dtype:", '"bfloat16"', "#", "derived:", "it", "is", "2x", "as", "fast"]


def _nodes(dtype: str = "auto") -> tuple[EngineOptions, EngineOptions]:
    """What both machines make of the same settings."""
    first, second = (resolve_keywords(TINY_MOE, {**NODES, "node_rank": rank, "dtype": dtype}) for rank in (0, 1))
    assert chosen_dtype(second) == (("--dtype auto: machine 0 chooses",) if dtype == "auto" else ())
    return to_engine_options(first), to_engine_options(second)


def test_one_machine_measures_for_all(measured: list[str], tmp_path: Path) -> None:
    """The checkpoint may be in another folder there."""
    first, second = _nodes()
    assert (first.dtype, second.dtype) == ("bfloat16", "auto")
    assert len(measured) == 1
    shutil.copytree(TINY_MOE, tmp_path / "elsewhere")
    second = replace(second, model=tmp_path / "elsewhere")
    store = dist.HashStore()
    Run.open(store, None).post_client_address("tcp://127.0.0.1:5", first)
    post_node(store, second)
    assert check_node(store, None, first, 1)
    _, settled = join_run(store, second)
    assert settled == replace(second, dtype="bfloat16")
    assert join_run(store, settled)[1] == settled  # as its ranks do
    assert describe_shape(settled) == describe_shape(first)


def test_machines_of_different_dtypes_still_refuse_each_other() -> None:
    store = dist.HashStore()
    Run.open(store, None).post_client_address("tcp://127.0.0.1:5", _nodes("bfloat16")[0])
    with pytest.raises(ConfigError, match='--dtype is "float32" on node 1 and "bfloat16" on node 0'):
        join_run(store, _nodes("float32")[1])
