"""What `ubatch bench engine` runs, on a model of a few thousand weights: every arm works, and all generate the same."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model_runner import RandomQwen3Moe
from serving.workbench.bench.server.compare import Options, Part, measure_served_overlap, run
from serving.workbench.bench.server.fake_device import measure_scheduler
from serving.workbench.bench.server.offline import Workload, make_served_model, measure_offline, random_prompts
from serving.workbench.bench.statistics import write_json

SMALL = RandomQwen3Moe(
    **{"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What is measured takes all cores; the tests that follow shall not."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("small"), SMALL)


def test_a_served_model_speaks(model: Path) -> None:
    from serving.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    (prompt,) = random_prompts(model, Workload(1, 20, 1))
    text = " ".join(f"w{token}" for token in prompt)
    assert tokenizer.encode(text) == prompt
    assert tokenizer.decode(prompt) == text


@pytest.mark.slow
def test_offline_and_served_generate_what_transformers_does(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure_offline(model, 2, Workload(4, 12, 6), ranks=[(1, 1)], transformers=True, served=True)
    assert list(result.arms_ms) == ["transformers", "offline_1", "served_1", "streamed_1"]
    assert all(len(values) == 2 for values in result.arms_ms.values())
    assert result.same == {"offline_1": 1.0, "served_1": 1.0, "streamed_1": 1.0}
    assert result.over_transformers.keys() == result.arms_ms.keys() - {"transformers"}
    assert result.over_offline.keys() == {"served_1", "streamed_1"}
    result.print()
    assert "generate: 4 x 12 in, 6 out" in capsys.readouterr().out
    write_json(tmp_path / "offline.json", vars(result))
    assert json.loads((tmp_path / "offline.json").read_text())["workload"]["prompts"] == 4


@pytest.mark.slow
def test_overlap_is_calibrated_and_engages(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads = {"prefill": Workload(4, 256, 2), "decode": Workload(8, 4, 4)}
    overlap = measure_served_overlap(model, 2, step_tokens=512, workloads=workloads)
    assert overlap.calibration.bytes_per_s > 0
    assert overlap.calibration.decode_speedup.keys() == {8, 16, 32, 64, 128}
    prefill, decode = overlap.results["prefill"], overlap.results["decode"]
    assert prefill.same == decode.same == 1.0
    assert prefill.steps["prefill/engaged"] > 0
    assert decode.arms_ms.keys() == {"without", "enable_dbo"}
    overlap.print()
    assert "prefill-heavy (4 x 256 in, 2 out); same tokens in 100%" in capsys.readouterr().out
    write_json(tmp_path / "overlap.json", vars(overlap))


@pytest.mark.wide
@pytest.mark.long
def test_a_device_is_never_faster_than_it_is() -> None:
    result = measure_scheduler(2, running=8)
    assert min(result.arms_ms["plain"]) > result.device_ms
    assert min(result.arms_ms["overlapped"]) > result.device_ms
    assert result.hidden.median <= 1.0


@pytest.mark.wide
@pytest.mark.long
def test_the_command_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.json"
    assert run(Options(only=(Part.SCHEDULER,), blocks=2, running=4, json_file=file)) == 0
    assert "scheduler: 4 running requests" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["options"]["only"] == ["scheduler"]
    assert written["scheduler"]["arms_ms"].keys() == {"host", "plain", "overlapped"}
