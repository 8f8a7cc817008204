"""DP 2 + EP 2 on two gloo ranks: idle ranks, failures and lazy loading. Tokens and logits: `test_model_conformance`."""

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture
from torch import Tensor

from model_runner import (
    PENDING_TOKEN,
    Checkpoint,
    ModelRunner,
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    generate,
)
from moe import ExpertPlacement
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, PeerFailed, UBatchConfig

NUM_TOKENS = 8
EAGER = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
"""Overlap whatever can be split."""


def prompts_of(rank: int) -> list[list[int]]:
    """Rank 0 has five prompts, rank 1 three shorter ones; one request that dwarfs the others makes rank 0 cut it."""
    rng = random.Random(rank)
    lengths = [5, 40, 2, 3, 9] if rank == 0 else [4, 4, 7]
    return [[rng.randrange(131) for _ in range(length)] for length in lengths]


def params_of(rank: int) -> list[SamplingParams]:
    """Rank 1 is done early."""
    count = len(prompts_of(rank))
    return [SamplingParams(max_tokens=NUM_TOKENS if rank == 0 else 3)] * count


checkpoint = checkpoint_fixture(num_hidden_layers=2, mlp_only_layers=[])


def fail_and_recover(rank: int, world_size: int, path: str) -> list[str]:
    seen = []
    group = CommGroup.from_process_group(timeout_s=20)
    with pytest.raises(ConfigError, match="the placement is for 3 ranks, but there are 2"):
        ModelRunner(path, group=group, placement=ExpertPlacement.default(2, 8, 3))
    with pytest.raises(ConfigError, match="different groups"):
        ModelRunner(path, group=None, dbo=UBatchConfig(group=group))
    with ModelRunner(path, group=group, num_kv_blocks=64, dbo=UBatchConfig(**EAGER)) as runner:
        expected = [output.token_ids for output in generate(runner, prompts_of(rank), params_of(rank))]

        # A prompt that only rank 1 finds wrong, before anything runs.
        with pytest.raises(RequestError if rank == 1 else PeerFailed) as caught:
            generate(runner, [[1, 2], []] if rank == 1 else [[1, 2, 3]], SamplingParams())
        seen.append(str(caught.value))
        group.reset()

        # Rank 0 fails in the middle of a step; nothing is left allocated on either.
        layer = runner.model.layers[1]
        forward = layer.forward
        if rank == 0:
            layer.forward = _fail
        with pytest.raises(ZeroDivisionError if rank == 0 else PeerFailed) as caught:
            generate(runner, prompts_of(rank), params_of(rank))
        seen.append(str(caught.value))
        layer.forward = forward
        runner.allocator.check(idle=True)
        group.reset()
        assert [output.token_ids for output in generate(runner, prompts_of(rank), params_of(rank))] == expected

        # Rank 1 fails after the step's last collective, when it samples: rank 0 learns of it in its next step.
        request = Request("late", [1, 2, 3], SamplingParams(min_tokens=1))
        runner.admit(request, 8)
        step = runner.launch([ScheduledRequest(request, 3)])
        request.advance(3, PENDING_TOKEN)
        step.sample()
        if rank == 0:
            request.token_ids[-1] = step.result().tokens[0][0]
        step = runner.launch([ScheduledRequest(request, 1)])
        with pytest.raises(RequestError if rank == 1 else PeerFailed) as caught:
            step.sample() if rank == 1 else runner.launch(())
        seen.append(str(caught.value))
        runner.release(request)
        group.reset()

        # One rank without any request, then both: nothing runs.
        outputs = generate(runner, prompts_of(0) if rank == 0 else [], SamplingParams(max_tokens=2))
        assert [output.token_ids for output in outputs] == ([tokens[:2] for tokens in expected] if rank == 0 else [])
        calls = runner.statistics().calls
        assert generate(runner, [], SamplingParams()) == []
        assert runner.statistics().calls == calls

        # Each rank reads its own experts only.
        seen.append(",".join(sorted(_experts_read(path, group))))
    return seen


def _fail(*_: Any) -> Tensor:
    raise ZeroDivisionError("layer 1 of rank 0")


def _experts_read(path: str, group: CommGroup) -> set[str]:
    read: set[str] = set()
    load_into = Checkpoint.load_into

    def record(self: Checkpoint, name: str, out: Tensor) -> None:
        read.add(name)
        load_into(self, name, out)

    Checkpoint.load_into = record  # type: ignore[method-assign]
    ModelRunner(path, group=group, num_kv_blocks=1).close()
    return {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name}


@pytest.mark.slow
def test_bad_input_failures_idle_ranks_and_lazy_loading(checkpoint: Path) -> None:
    first, second = run_ranks(fail_and_recover, 2, str(checkpoint))
    assert "rank 1 failed with RequestError: prompt 1 is empty" in first[0]
    assert "prompt 1 is empty" in second[0]
    assert "layer 1 of rank 0" in first[1]
    assert "rank 0 failed with ZeroDivisionError: layer 1 of rank 0" in second[1]
    assert "rank 1 failed with RequestError: request 'late' has penalties, min_tokens or bad sequences" in first[2]
    assert "its token 3 is not known yet" in second[2]
    assert (first[3], second[3]) == ("0,1,2,3", "4,5,6,7")
