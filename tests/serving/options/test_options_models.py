"""Settings against the checkpoint and its engines: dense models, draft networks, which process is what, restarts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from dense_checkpoint import make_small
from engine_mains import tiny
from repository import MODELS, TINY_MOE

from attention import UBatchAttention
from model_runner import ModelRunner
from moe import FusedExperts
from serving import generate
from serving.cli import main
from serving.engine.offline import make_offline_engine
from serving.engine.options import EngineOptions, RestartLimits
from serving.engine.rank.build import make_core, make_runner
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from serving.offline.opening import resolve_options
from serving.options import notes, read_serve_command, resolve_keywords, to_engine_options
from ubatch import ConfigError

TINY, HEAD = str(TINY_MOE), str(MODELS / "tiny-moe-eagle")


def test_the_experts_back_end_reaches_the_runner() -> None:
    options = to_engine_options(
        read_serve_command("ubatch serve", "", [TINY, "--moe-backend", "reference", "--device", "cpu"]).settings
    )
    with make_runner(replace(options, kv_cache_memory=1 << 20)) as runner:
        experts = {type(each).__name__ for each in runner.model.modules() if isinstance(each, FusedExperts)}
    assert experts == {"ReferenceExperts"}


def test_a_dense_model_has_no_experts_to_choose_for(tmp_path: Path) -> None:
    make_small(tmp_path, dense=True)
    with pytest.raises(ConfigError, match=r"--moe-backend grouped: the checkpoint is a dense model\."):
        read_serve_command("ubatch serve", "", [str(tmp_path), "--moe-backend", "grouped", "--device", "cpu"])
    with pytest.raises(ConfigError, match="is a dense model, without experts that --enable-expert-parallel could"):
        read_serve_command("", "", [str(tmp_path), "--data-parallel-size", "2", "--enable-expert-parallel"])


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


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        ("eagle", {"hidden_size": 96}, r"hidden_size of .* is 96, the model's is 192: the head does not fit"),
        ("draft_model", {"vocab_size": 99}, r"vocab_size of .* is 99, the model's is 2048: the two must share a token"),
    ],
)
def test_draft_networks_that_do_not_fit(algorithm: str, change: dict[str, int], message: str, tmp_path: Path) -> None:
    source = Path(HEAD if algorithm == "eagle" else TINY)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    keywords = {"speculative_algorithm": algorithm, "speculative_draft_model_path": tmp_path}
    with pytest.raises(ConfigError, match=message):
        resolve_keywords(TINY, keywords)
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(tmp_path)]
    with pytest.raises(ConfigError, match=message):
        generate.read("ubatch generate", "", [TINY, "--prompt", "x", *flags])


def test_attention_without_tree_masks_refuses_trees_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = SpeculationConfig(Algorithm.EAGLE, 4, 2, 2, Path(HEAD))
    monkeypatch.setattr(UBatchAttention, "takes_trees", False)
    with pytest.raises(ConfigError, match=r"'\w+' has no tree masks, so drafts cannot be trees \(topk 2\)"):
        ModelRunner(TINY, kv_cache_memory=1 << 20, **runner_options(speculation))


def test_a_runner_that_was_made_for_no_draft_network_is_refused() -> None:
    options = EngineOptions(Path(TINY), speculation=SpeculationConfig(Algorithm.EAGLE, 2, 2, 1, Path(HEAD)))
    with (
        ModelRunner(TINY, kv_cache_memory=1 << 20) as runner,
        pytest.raises(ConfigError, match="without a draft network"),
    ):
        make_core(options, runner)


# -- how often engines are started again -------------------------------------------------------------------------------


def of_server(*words: str) -> RestartLimits:
    return read_serve_command("ubatch serve", "", [TINY, *words]).engine.restarts


def test_a_server_starts_its_engines_again_and_scripts_do_not() -> None:
    assert of_server() == RestartLimits(3, 600.0, 60.0)
    words = ("--max-engine-restarts", "7", "--engine-restart-window-s", "60", "--resume-timeout-s", "0")
    assert of_server(*words) == RestartLimits(7, 60.0, 0.0)
    of_generate = generate.read("ubatch generate", "", [TINY, "--prompt", "a", *words[:4]])
    assert of_generate.engine.restarts == RestartLimits(7, 60.0)
    assert generate.read("ubatch generate", "", [TINY, "--prompt", "a"]).engine.restarts.max_engine_restarts == 0
    in_script = {"max_engine_restarts": 2, "engine_restart_window_s": 30.0, "resume_timeout_s": 5.0}
    for options, limits in (({}, RestartLimits()), (in_script, RestartLimits(2, 30.0, 5.0))):
        assert to_engine_options(resolve_options(TINY, options)[0]).restarts == limits


def test_times_without_restarts_are_told() -> None:
    words = ("--max-engine-restarts", "0", "--engine-restart-window-s", "60", "--resume-timeout-s", "5")
    (note,) = notes(read_serve_command("ubatch serve", "", [TINY, *words]).settings)
    assert note == (
        "--engine-restart-window-s, --resume-timeout-s without --max-engine-restarts: no engine is started again"
    )


def test_a_rank_in_the_callers_process_cannot_be_started_again() -> None:
    with pytest.raises(
        ConfigError, match=r"max_engine_restarts is 2, but a single rank runs in this process.*AsyncLLM"
    ):
        make_offline_engine(tiny(1, restarts=RestartLimits(2)))
