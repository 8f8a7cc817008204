"""`--load-format dummy`: random weights that all ranks agree on, and the command line of a user of vLLM with them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hub_cache import LITE, add_to_cache, make_lite
from repository import TINY_MOE

from model_runner import CheckpointFileMissing, ModelRunner, SamplingParams
from model_runner.weights.dummy_weights import DummyCheckpoint, open_checkpoint
from model_runner.weights.weights import Part
from serving import LLM
from serving.workbench.bench.server.process import running_server
from ubatch import ConfigError

pytestmark = pytest.mark.long

LITE_NAME = "deepseek-ai/DeepSeek-V2-Lite"
EP = {"data_parallel_size": 2, "enable_expert_parallel": True}
DBO = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17], [18, 19]]


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lite(tmp_path_factory.mktemp("models") / "lite")


def generate(folder: Path, **options: Any) -> tuple[list[tuple[int, ...]], int]:
    """Greedy tokens of every prompt, and how many steps overlapped."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    small = {"load_format": "dummy", "kv_cache_memory": "8M", "max_num_seqs": 4, "device": "cpu"}
    with LLM(folder, **small, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        engaged = sum(
            count for each in llm.statistics.values() for kind, count in each.steps.items() if kind.endswith("/engaged")
        )
    return [tuple(output.outputs[0].token_ids) for output in outputs], engaged


@pytest.fixture(scope="module")
def alone(lite: Path) -> list[tuple[int, ...]]:
    return generate(lite)[0]


def test_one_rank(alone: list[tuple[int, ...]], lite: Path) -> None:
    assert len(set(alone)) == len(PROMPTS)
    assert all(len(set(tokens)) > 2 for tokens in alone)  # no model that says one thing only
    assert generate(lite)[0] == alone


@pytest.mark.parametrize(
    "options",
    [{**EP}, {**EP, **DBO}, {"tensor_parallel_size": 2, "enable_expert_parallel": True, **DBO}],
    ids=["experts shared", "overlapped", "tensor parallel"],
)
@pytest.mark.slow
def test_ranks_agree_on_weights_that_nobody_stored(
    options: dict[str, Any], lite: Path, alone: list[tuple[int, ...]]
) -> None:
    tokens, engaged = generate(lite, **options)
    assert tokens == alone
    assert (engaged > 0) == ("enable_dbo" in options)


def test_numbers_depend_on_name_place_and_seed_alone(lite: Path) -> None:
    checkpoint = open_checkpoint(lite, "dummy", dtype=torch.bfloat16)
    whole = checkpoint.load("a.weight", 64, 48)
    assert (whole.shape, whole.dtype) == ((64, 48), torch.bfloat16)
    part = checkpoint.load("a.weight", Part(16, 8, 64), Part(24, 24, 48))
    assert torch.equal(part, whole[16:24, 24:])
    fused = checkpoint.load_fused([("b.weight", 4), ("a.weight", Part(0, 4, 64))], 48)
    assert torch.equal(fused[4:], whole[:4])
    assert not torch.equal(whole, checkpoint.load("b.weight", 64, 48))
    assert torch.equal(whole, DummyCheckpoint(lite, dtype=torch.bfloat16).load("a.weight", 64, 48))
    assert not torch.equal(whole, DummyCheckpoint(lite, seed=1, dtype=torch.bfloat16).load("a.weight", 64, 48))
    assert torch.equal(checkpoint.load("x_norm.weight", 5).float(), torch.ones(5))
    assert torch.equal(checkpoint.load("x.bias", 5).float(), torch.zeros(5))
    assert checkpoint.load("a.weight", 2048, 48).float().std() == pytest.approx(48**-0.5, rel=0.02)
    large = checkpoint.load("large.weight", 3, 2**20)  # more than there are random numbers
    assert not torch.equal(large[0], large[1])


@pytest.mark.wide
def test_logits_are_finite_at_any_depth(tmp_path: Path) -> None:
    folder = make_lite(tmp_path / "deep")
    (folder / "config.json").write_text(json.dumps({**LITE, "num_hidden_layers": 40}))
    tokens, _ = generate(folder)
    assert all(len(each) == 8 for each in tokens)  # a request whose logits are not finite ends with an error


def test_weights_that_are_there_are_not_read_for_dummy_and_are_for_the_others(lite: Path) -> None:
    with (
        ModelRunner(TINY_MOE, kv_cache_memory=1 << 20) as auto,
        ModelRunner(TINY_MOE, load_format="safetensors", kv_cache_memory=1 << 20) as stored,
        ModelRunner(TINY_MOE, load_format="dummy", kv_cache_memory=1 << 20) as dummy,
    ):
        weights = [next(each.model.parameters()) for each in (auto, stored, dummy)]
        assert torch.equal(weights[0], weights[1])
        assert weights[2].shape == weights[0].shape
        assert not torch.equal(weights[0], weights[2])
    with pytest.raises(CheckpointFileMissing):
        ModelRunner(lite, kv_cache_memory=1 << 20)
    with pytest.raises(ConfigError, match="unknown load_format 'dumy'; did you mean 'dummy'"):
        ModelRunner(lite, load_format="dumy")


def test_drafts_have_dummy_weights_too(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").symlink_to(TINY_MOE.parent / "tiny-moe-eagle" / "config.json")
    eagle = {"speculative_algorithm": "eagle", "speculative_draft_model_path": folder, "speculative_num_steps": 2}
    assert generate(TINY_MOE, **eagle)[0] == generate(TINY_MOE)[0]


@pytest.mark.slow
def test_the_command_line_of_a_user_of_vllm(tmp_path: Path, lite: Path) -> None:
    """The example of vLLM's page on dual-batch overlap, with a transport that runs here and weights of no size."""
    add_to_cache(tmp_path, LITE_NAME, lite, "d" * 40, "main")
    flags = ["--model", LITE_NAME, "--trust-remote-code", "--data-parallel-size", "2", "--enable-expert-parallel"]
    flags += ["--enable-dbo", "--load-format", "dummy", "--device", "cpu", "--kv-cache-memory", "8M"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "VLLM_ALL2ALL_BACKEND": "naive"}
    with running_server(Path(LITE_NAME), flags, environment=environment) as server:
        with httpx.Client(base_url=server.base_url, timeout=60, trust_env=False) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == LITE_NAME
            body = {"model": LITE_NAME, "prompt": "def main(", "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        log = server.output()
    assert "no remote code is ever run" in log
    assert log.count("no remote code is ever run") == 1
    assert "all2all back end allgather_reducescatter reason=VLLM_ALL2ALL_BACKEND" in log
