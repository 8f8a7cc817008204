"""`--tensor-parallel-size`: how it is written, what it needs, and which process is what."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dense_checkpoint import make_small
from repository import TINY_MOE

from serving.cli import main
from serving.engine import EngineOptions
from serving.options import notes, read_serve_command, resolve_settings
from serving.options.sources import read_keywords
from ubatch import ConfigError

TINY = str(TINY_MOE)
EP = ("--enable-expert-parallel",)


def engine(*words: str) -> EngineOptions:
    return read_serve_command("ubatch serve", "", [TINY, *words]).engine


@pytest.mark.parametrize(
    "words", [("--tensor-parallel-size", "2"), ("--tensor-parallel-size=2",), ("-tp", "2"), ("-tp=2",)]
)
def test_it_is_written_as_in_vllm(words: tuple[str, ...], tmp_path: Path) -> None:
    assert engine(*EP, *words).tensor_parallel_size == 2
    file = tmp_path / "serve.yaml"
    file.write_text("tensor-parallel-size: 4\nenable-expert-parallel: true\n")
    assert engine("--config", str(file)).tensor_parallel_size == 4
    assert engine("--config", str(file), *words).tensor_parallel_size == 2


def test_the_settings_in_force_say_where_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", TINY, *EP, "-tp", "2", "--print-config"]) == 0
    assert "tensor-parallel-size: 2 # command line" in " ".join(capsys.readouterr().out.split())


def test_overlap_has_something_to_hide_where_attention_is_shared(tmp_path: Path) -> None:
    """A dense model needs no expert parallelism: what its ranks gather and scatter can be overlapped, too."""
    dense = str(make_small(tmp_path / "dense", dense=True))
    for words, noted in (((), True), (("-tp", "2"), False)):
        settings = read_serve_command("ubatch serve", "", [dense, "--enable-dbo", *words]).settings
        assert any("no communication to hide" in note for note in notes(settings)) is noted


def test_a_link_carries_what_a_dense_model_gathers(tmp_path: Path) -> None:
    dense = str(make_small(tmp_path / "dense", dense=True))
    for words in (["generate", dense, "--prompt", "x"], ["serve", dense, "--print-config"]):
        assert main([*words, "--emulated-link", "10", "1000"]) == 2
    shutil.copy(TINY_MOE / "tokenizer.json", dense)
    assert main(["serve", dense, "--print-config", "-tp", "2", "--emulated-link", "10", "1000"]) == 0
    assert read_serve_command("", "", [dense, "-tp", "2", "--emulated-link", "10", "1000"]).engine.emulated_link


def test_too_few_gpus_are_the_fault_of_both_sizes() -> None:
    more = {"enable_expert_parallel": True, "device": "cuda"}
    for sizes, flags in (({"tensor_parallel_size": 2}, "^tensor"), ({"data_parallel_size": 2}, "^data")):
        with pytest.raises(ConfigError, match=rf"{flags}_parallel_size: 2 processes on this machine, which has 1 GPUs"):
            resolve_settings(read_keywords({"model": TINY, **sizes, **more}), gpus=1)
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    with pytest.raises(ConfigError, match="data_parallel_size times tensor_parallel_size: 4 processes"):
        resolve_settings(read_keywords({"model": TINY, **sizes, **more}), gpus=1)


def test_the_processes_of_a_rank_are_neighbours_on_one_node() -> None:
    options = EngineOptions(
        TINY_MOE, data_parallel_size=4, tensor_parallel_size=2, nnodes=2, node_rank=1, master_port=1, device="cpu"
    )
    assert options.world_size == 8
    assert options.local_ranks == range(4, 8)
    assert [options.dp_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [options.tp_rank(rank) for rank in range(8)] == [0, 1] * 4
    assert [options.leader(dp_rank) for dp_rank in range(4)] == [0, 2, 4, 6]
    assert options.describe_rank(5) == "rank 5 (DP 2, TP 1)"
    assert EngineOptions(TINY_MOE).describe_rank(0) == "rank 0"
    assert options.step_size == 2
    assert EngineOptions(TINY_MOE, tensor_parallel_size=2, enable_expert_parallel=True).step_size == 2
    both = EngineOptions(TINY_MOE, data_parallel_size=3, tensor_parallel_size=2, enable_expert_parallel=True)
    assert both.step_size == 6
    with pytest.raises(ConfigError, match="tensor_parallel_size: it should be at least 1"):
        read_keywords({"tensor_parallel_size": 0})
