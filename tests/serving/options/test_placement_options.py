"""`--init-expert-location`, `--eplb-config`, `--expert-load-out`: what engines get, and files refused at once."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from repository import TINY_MOE

from moe import ExpertPlacement
from moe.balance import EplbConfig
from serving import generate
from serving.cli import main
from serving.engine import EngineOptions
from serving.engine.wire.agreement import describe_shape, require_same_shape
from serving.offline.opening import resolve_options
from serving.options import SERVE, notes, read_layers, read_serve_command, resolve_keywords, to_engine_options
from serving.options.resolve import resolve_settings
from ubatch import ConfigError

EP = {"data_parallel_size": 2, "enable_expert_parallel": True, "log_level": "warning"}
LAYERS, EXPERTS = 4, 8
TURNED = np.array([[*range(EXPERTS - 1, -1, -1)]] * LAYERS)


def options_of(**keywords: Any) -> EngineOptions:
    return to_engine_options(resolve_keywords(TINY_MOE, {**EP, **keywords}))


def by_words(*words: str) -> EngineOptions:
    layers, _ = read_layers(SERVE, "ubatch serve", "", [str(TINY_MOE), "-dp", "2", "-ep", *words])
    return to_engine_options(resolve_settings(*layers))


def write(path: Path, experts: Any, num_experts: int = EXPERTS, ranks: int = 2) -> str:
    ExpertPlacement(np.array(experts), num_experts, ranks).save(path)
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ["--eplb-config", '{"num_redundant_experts": 4}'],
        ["--eplb-config.num_redundant_experts", "4"],
        ["--eplb-config.num-redundant-experts=4"],
        ["--eplb_config.num_redundant_experts=4"],
    ],
)
def test_keys_in_json_and_behind_points(words: list[str]) -> None:
    assert by_words(*words).eplb_config == EplbConfig(num_redundant_experts=4)
    assert options_of(eplb_config={"num-redundant-experts": 4}).eplb_config == EplbConfig(num_redundant_experts=4)
    assert by_words().eplb_config == EplbConfig()


def test_a_wrong_value_is_named_once() -> None:
    for config, message in (
        ({"window_size": "3"}, "eplb_config: window_size must be int, not '3' (str)."),
        ({"step_interval": 0}, "eplb_config: step_interval must be at least 1, not 0."),
    ):
        with pytest.raises(ConfigError) as refused:
            options_of(eplb_config=config)
        assert str(refused.value) == message


@pytest.mark.parametrize("name", ["placement.yaml", "placement.json"])
def test_a_placement_reaches_the_engines(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, TURNED)
    for options in (options_of(init_expert_location=path), by_words("--init-expert-location", path)):
        assert options.placement is not None
        assert (options.placement.experts == TURNED).all()
        assert pickle.loads(pickle.dumps(options)).placement == options.placement
    assert by_words("--init-expert-location", "trivial").placement is None


def test_sglangs_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "location.json"
    rows = [[*range(EXPERTS), 0, 1]] * LAYERS
    path.write_text(json.dumps({"physical_to_logical_map": rows, "logical_count": [[[1] * EXPERTS]]}))
    placement = options_of(init_expert_location=str(path)).placement
    assert placement is not None
    assert (placement.num_ranks, placement.slots_per_rank, placement.replicas[0, 0]) == (2, 5, 2)


def test_rows_of_dense_layers_are_left_out(tmp_path: Path) -> None:
    from model_runner.parallel import read_placement

    path = tmp_path / "location.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1], [1, 0], [0, 1]]}))
    placement = read_placement(path, 2, 3, (1, 2), 2)
    assert placement is not None
    assert placement.experts.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("placement", "more", "message"),
    [
        ((TURNED, EXPERTS, 4), {}, "the placement is for 4 ranks, but there are 2"),
        ((TURNED[:3], EXPERTS, 2), {}, "the placement is for 3 MoE layers, but there are 4"),
        (([[*range(6)]] * LAYERS, 6, 2), {}, "the placement is for 6 experts in a layer, but there are 8"),
        ((TURNED, EXPERTS, 2), {"eplb_config": {"num_redundant_experts": 2}}, "2 redundant experts make 10"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, placement: Any, more: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "placement.yaml", *placement)
    with pytest.raises(ConfigError, match=f"init_expert_location: {path}: .*{message}"):
        options_of(init_expert_location=path, **more)


def test_redundant_experts_beyond_all_on_every_rank_are_refused() -> None:
    assert options_of(eplb_config={"num_redundant_experts": 8}).eplb_config.num_redundant_experts == 8
    with pytest.raises(ConfigError, match="eplb_config: 9 redundant experts are too many: with 8, each of 2 ranks"):
        options_of(eplb_config={"num_redundant_experts": 9})


def test_nodes_agree_on_the_placement(tmp_path: Path) -> None:
    """By its content: the file may lie elsewhere on each node."""
    own, other = (write(tmp_path / name, TURNED) for name in ("a.yaml", "b.json"))
    another = write(tmp_path / "c.yaml", np.roll(TURNED, 1, axis=1))
    there = describe_shape(options_of(init_expert_location=own))
    require_same_shape(options_of(init_expert_location=other), there, 1)
    with pytest.raises(ConfigError, match=r"--init-expert-location is .*SHA-256"):
        require_same_shape(options_of(init_expert_location=another), there, 1)
    with pytest.raises(ConfigError, match="--eplb-config is"):
        require_same_shape(options_of(eplb_config={"num_redundant_experts": 2}), describe_shape(options_of()), 1)


# -- the experts' load in a file ---------------------------------------------------------------------------------------


TINY = str(TINY_MOE)


def test_every_command_that_runs_engines_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    words = [TINY, "--expert-load-out", str(path)]
    assert read_serve_command("ubatch serve", "", words).engine.expert_load_out == path
    assert generate.read("ubatch generate", "", [*words, "--prompt", "a"]).engine.expert_load_out == path
    for given in (path, str(path)):
        assert to_engine_options(resolve_options(TINY, {"expert_load_out": given})[0]).expert_load_out == path
    assert read_serve_command("ubatch serve", "", [TINY]).engine.expert_load_out is None


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = str(make_checkpoint(tmp_path, "Llama"))
    for model, path, why in (
        (TINY, tmp_path / "loads.csv", "--expert-load-out"),
        (TINY, tmp_path / "loads.csv", "ends with .npy or .json"),
        (TINY, tmp_path / "none" / "loads.npy", "there is no folder"),
        (dense, tmp_path / "loads.npy", "the checkpoint is a dense model. Remove it."),
    ):
        assert main(["serve", model, "--expert-load-out", str(path)]) == 2
        assert why in capsys.readouterr().err


def test_other_machines_say_that_machine_0_writes_it(tmp_path: Path) -> None:
    nodes = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500")
    there = tmp_path / "only on machine 0" / "loads.npy"
    command = read_serve_command("ubatch serve", "", [TINY, "-dp", "2", "-ep", *nodes, "--expert-load-out", str(there)])
    assert any(note.startswith("--expert-load-out without the client: machine 0") for note in notes(command.settings))
