"""Models with linear attention, through the server's scheduler: tokens are transformers', however states came about."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FAMILIES, load_reference, make_checkpoint, reference_greedy
from fake_proposer import FakeProposer
from request_steps import step

from attention import KVCacheError
from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, check_tensor_parallel, generate
from model_runner.memory.memory_profile import CudaMemory
from ranks import run_ranks
from serving.engine import EngineCore, EngineOptions
from serving.engine.rank.build import describe_memory, make_runner
from serving.engine.speculation import Algorithm, SpeculationConfig, make_scheduler, runner_options
from serving.options import notes, resolve_keywords
from serving.requests import RequestInput
from serving.scheduler import SchedulerConfig, kv_manager
from ubatch import CommGroup, ConfigError, UBatchConfig

LANES = {"dbo_decode_token_threshold": 3, "dbo_prefill_token_threshold": 3}
ROOM = {"num_kv_blocks": 160, "block_size": 4, "max_num_seqs": 8}
NEW = 6


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(count)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrids")
    return {family: make_checkpoint(folder / family, family) for family in ("Qwen3Next", "Qwen3_5Moe")}


class Conversations:
    """Waves of prompts that begin alike, and what transformers says after each."""

    def __init__(self, path: Path, new: int = NEW) -> None:
        model, self.new = load_reference(path), new
        stem, first = tokens_of(1, 45), tokens_of(2, 70)

        def said(prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
            return [(prompt, reference_greedy(model, prompt, new)[0]) for prompt in prompts]

        opening = said([first, stem + tokens_of(3, 9), tokens_of(4, 3)])
        turns = [prompt + answer + tokens_of(5, 11) for prompt, answer in opening]
        branch = stem + tokens_of(6, 14)  # leaves `opening[1]` where no snapshot is
        once = said([*turns, branch, stem + tokens_of(7, 5)])
        alike = said([tokens_of(8, 50)])
        self.waves = [opening, once, [*opening[:2], *alike * 3, *said([stem + tokens_of(9, 20)])]]


@pytest.fixture(scope="module")
def conversations(paths: dict[str, Path]) -> dict[str, Conversations]:
    return {family: Conversations(path) for family, path in paths.items()}


def serve(
    core: EngineCore, waves: Sequence[Sequence[tuple[list[int], list[int]]]]
) -> tuple[list[Any], list[list[int]]]:
    """Every wave to its end, on this rank and all others; returns tokens, and cached tokens of each request."""
    got: list[Any] = []
    cached: list[list[int]] = []
    for number, wave in enumerate(waves):
        tokens: list[list[int]] = [[] for _ in wave]
        cached.append([0] * len(wave))
        for index, (prompt, answer) in enumerate(wave):
            params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
            core.add(RequestInput(f"{number} {index}", prompt, params))
        while core.has_work or not core.idle:
            for output in core.step():
                index = int(output.request_id.split()[1])
                tokens[index] += output.token_ids
                cached[-1][index] = output.num_cached_tokens
            core.scheduler.check()
        core.scheduler.check(idle=True)
        got += tokens
    return got, cached


def answers(waves: Sequence[Sequence[tuple[list[int], list[int]]]]) -> list[list[int]]:
    return [answer for wave in waves for _, answer in wave]


CASES: dict[str, dict[str, Any]] = {
    "plain": {"family": "Qwen3Next"},
    "overlapped": {"family": "Qwen3_5Moe", "overlap": True, "lanes": 2},
    "chunks": {"family": "Qwen3Next", "overlap": True, "budget": 22, "snapshots": 3, "lanes": 3},
    "prefill first": {"family": "Qwen3_5Moe", "prefill_first": True, "interval": 8},
    "drafts": {"family": "Qwen3_5Moe", "drafts": True, "interval": 8, "lanes": 2},
    "crowded": {"family": "Qwen3Next", "overlap": True, "blocks": 48, "interval": 8},
    "no snapshots": {"family": "Qwen3Next", "snapshots": 0, "budget": 30, "lanes": 3, "split_by": "cost"},
    "drafts without": {"family": "Qwen3Next", "snapshots": 0, "drafts": True, "lanes": 2, "crowd": True},
    "retracted": {"family": "Qwen3_5Moe", "snapshots": 0, "overlap": True, "budget": 12, "lanes": 2, "crowd": True},
}
CROWD = {"blocks": 25, "seqs": 10, "new": 26}
"""Short prompts that grow until some have to give up their blocks."""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_requests_go_on_from_snapshots(
    paths: dict[str, Path],
    conversations: dict[str, Conversations],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Later turns, equal prompts at once (`n` > 1), beginnings that several share, and nothing that fits.

    Without snapshots nobody does; chunked prompts, mixed steps, drafts and retraction are as right.
    """
    case = CASES[name]
    family, lanes, snapshots = case["family"], case.get("lanes", 1), case.get("snapshots", 16)
    waves = conversations[family].waves
    if case.get("crowd"):
        case = CROWD | case
        reference = load_reference(paths[family])
        prompts = [tokens_of(length, length) for length in (5, 9, 7, 20, 3, 8, 1, 6)]
        prompts += [[*prompts[3][:12], 1, 2, 3], prompts[3]]
        with ModelRunner(paths[family], num_kv_blocks=320, block_size=4, max_num_seqs=len(prompts)) as runner:
            guesses = [each.token_ids for each in generate(runner, prompts, SamplingParams(max_tokens=case["new"]))]
        pairs = zip(prompts, guesses, strict=True)
        waves = [[(prompt, reference_greedy(reference, prompt, case["new"], guess)[0]) for prompt, guess in pairs]]
    monkeypatch.setattr(kv_manager, "SNAPSHOT_INTERVAL", case.get("interval", 256))
    speculation = SpeculationConfig(Algorithm.NGRAM, 3) if case.get("drafts") else None
    known = {tuple(prompt): answer for wave in waves for prompt, answer in wave}

    def right_one(request: Request, tokens: Sequence[int]) -> int:
        answer = known[tuple(tokens[: request.num_prompt_tokens])]
        return [*answer, 0, 0, 0, 0][len(tokens) - request.num_prompt_tokens]

    monkeypatch.setattr("serving.engine.speculation.make_proposer", lambda *_: FakeProposer(right_one, vocab_size=131))
    dbo = UBatchConfig(
        **LANES, num_ubatches=max(lanes, 2), split_by=case.get("split_by", "tokens"), enable_dbo=lanes > 1
    )
    most = case.get("seqs", 8)
    room = {**ROOM, "num_kv_blocks": case.get("blocks", 160), "max_num_seqs": most, "num_state_snapshots": snapshots}
    config = SchedulerConfig(
        max_num_seqs=most,
        max_num_batched_tokens=case.get("budget", 300),
        max_model_len=110,
        prefill_first=case.get("prefill_first", False),
    )
    with ModelRunner(paths[family], dbo=dbo, max_model_len=110, **room, **runner_options(speculation)) as runner:
        assert (f"and {snapshots} snapshots" in describe_memory(runner)) == (snapshots > 0)
        with caplog.at_level("INFO"):
            scheduler = make_scheduler(config, speculation, runner)
        assert ("prefix cache off" in caplog.text) == (snapshots == 0)
        core = EngineCore(runner, scheduler, overlap_schedule=case.get("overlap", False))
        got, cached = serve(core, waves)
        statistics = scheduler.statistics()
        assert (runner.statistics().engaged > NEW) == (lanes > 1)
    assert got == answers(waves)
    assert statistics.prefix_hits == sum(map(sum, cached))
    assert (statistics.prefix_hits > 0) == (snapshots > 0)
    assert statistics.preemptions > 0 or "crowd" not in case
    assert (statistics.accepted_tokens > 0) == ("drafts" in case)
    if name == "plain":  # the last page border of a prompt; a beginning that a second request showed; equal prompts
        assert cached == [[0, 0, 0], [68, 52, 0, 0, 44], [68, 52, 0, 48, 48, 44]]


def serve_on_a_rank(rank: int, world_size: int, path: str, size: int, waves: Any) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=30)
    results = {}
    own = waves if rank // size == 0 else [wave[1:] for wave in waves]  # this rank is idle at times
    for name, snapshots, dbo in (
        ("without", 0, UBatchConfig(enable_dbo=False)),
        ("with", 8, UBatchConfig(**LANES, schedule="two_batch_decode")),
    ):
        room = {**ROOM, "tensor_parallel_size": size, "num_state_snapshots": snapshots, "dbo": dbo}
        with ModelRunner(path, group=group, max_model_len=110, **room) as runner:
            config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=60, max_model_len=110)
            core = EngineCore(runner, make_scheduler(config, None, runner), overlap_schedule=True)
            results[name] = (*serve(core, own), runner.statistics().engaged)
    return results


@pytest.mark.wide
@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2], ids=["DP 2", "TP 2"])
def test_ranks_go_on_from_snapshots(paths: dict[str, Path], conversations: dict[str, Conversations], size: int) -> None:
    waves = conversations["Qwen3Next"].waves[:2]
    for rank, results in enumerate(run_ranks(serve_on_a_rank, 2, str(paths["Qwen3Next"]), size, waves)):
        own = waves if rank // size == 0 else [wave[1:] for wave in waves]
        for name, (got, cached, engaged) in results.items():
            assert got == answers(own), name
            assert (sum(map(sum, cached)) > 50) == (engaged > 0) == (name == "with")


def test_a_snapshot_is_the_state_that_would_be_computed(paths: dict[str, Path]) -> None:
    """Kept after a chunk, restored for another request; and never kept right after drafts."""
    prompt = tokens_of(11, 23)
    with ModelRunner(paths["Qwen3_5Moe"], **ROOM, num_state_snapshots=2, num_speculative_tokens=2) as runner:
        pool = runner.states
        assert pool is not None

        def computed(name: str, *chunks: int, **share: int) -> Request:
            request = Request(name, prompt, SamplingParams())
            runner.admit(request, 30)
            for number, count in enumerate(chunks, 1):
                runner.execute([ScheduledRequest(request, count, **(share if number == len(chunks) else {}))])
                request.num_computed_tokens += count
            return request

        kept = computed("kept", 20, keep=1)
        whole, parts = computed("whole", 20), computed("parts", 7, 13)
        assert None not in (kept.row, parts.row, whole.row)
        # The kept request goes on; its snapshot does not.
        step(runner, [ScheduledRequest(kept, 3)])
        pool.restore([1], [parts.row])
        for held in (pool.windows, pool.states):
            for layer in held:
                torch.testing.assert_close(layer[parts.row], layer[whole.row])
                assert not torch.equal(layer[kept.row], layer[whole.row])
        # Two requests, one of them with the restored state, say the same.
        both = [whole, parts]
        shares = [ScheduledRequest(whole, 3), ScheduledRequest(parts, 3, restore=1)]
        for _ in range(4):
            first, second = step(runner, shares).tokens
            assert first == second
            shares = [ScheduledRequest(request, 1) for request in both]
        # A draft that is right and one that is not; then a step without, which keeps what has seen the right one only.
        right = whole.output_token_ids
        assert kept.output_token_ids == right[:1]
        (accepted,) = step(runner, [ScheduledRequest(kept, 1, (right[1], right[2] + 1))]).tokens
        assert list(accepted) == right[1:3]
        runner.execute([ScheduledRequest(kept, 1, keep=0)])
        for held in (pool.windows, pool.states):
            for layer in held:
                torch.testing.assert_close(layer[pool.num_slots], layer[whole.row])
        with pytest.raises(KVCacheError, match=r"right after a step with drafts"):
            runner.execute([ScheduledRequest(whole, 1, (5, 6), keep=0)])


def test_an_engine_has_room_for_as_many_as_it_was_told(paths: dict[str, Path]) -> None:
    assert list(notes(resolve_keywords(paths["Qwen3Next"], {"num_state_snapshots": 3}))) == []
    for caching, expected in ((True, 3), (False, 0)):
        config = SchedulerConfig(max_num_seqs=2, max_model_len=64, num_state_snapshots=3, enable_prefix_caching=caching)
        with make_runner(EngineOptions(paths["Qwen3Next"], scheduler=config), num_kv_blocks=8) as runner:
            assert runner.states is not None
            assert runner.states.num_snapshots == expected
            assert make_scheduler(config, None, runner).kv.tree.snapshots.count == expected


def test_a_checkpoint_that_can_see_runs_without_its_eyes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = transformers.Qwen3_5MoeConfig(text_config=dict(FAMILIES["Qwen3_5Moe"]), vision_config=eyes)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    prompt = tokens_of(3, 19)
    with caplog.at_level("INFO"), ModelRunner(tmp_path, num_kv_blocks=16) as runner:
        (got,) = generate(runner, [prompt], SamplingParams(max_tokens=NEW))
    assert list(got.token_ids) == reference_greedy(model, prompt, NEW)[0]
    assert "vision tower, which is not served" in caplog.text


def test_what_a_state_cannot_do_is_refused(paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"2 layers of this model have linear attention.* a tree of drafts"):
        ModelRunner(paths["Qwen3Next"], num_kv_blocks=16, num_speculative_tokens=2, speculative_trees=True)
    with ModelRunner(paths["Qwen3Next"], num_kv_blocks=16) as runner:
        with pytest.raises(ConfigError, match="does not divide the 2 key heads of its linear attention"):
            check_tensor_parallel(runner.config, 4)
        request = Request(0, [1, 2, 3, 4], SamplingParams())
        runner.admit(request, 16)
        share = ScheduledRequest(request, 2)
        runner.execute([share])
        request.advance(2, None)
        request.num_computed_tokens = 3  # as if a page had been found in a prefix cache
        with pytest.raises(KVCacheError, match=r"begins at token 3 .* have seen 2"):
            runner.execute([ScheduledRequest(request, 1)])


def test_states_take_their_part_of_a_gpus_memory(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before memory is measured, so the KV cache gets what they leave."""
    held: list[int] = []

    def measured(runner: ModelRunner, *_: object) -> int:
        held.append(0 if runner.states is None else runner.states.nbytes)
        return 16

    monkeypatch.setattr("model_runner.runner.measured_blocks", measured)
    with ModelRunner(
        paths["Qwen3Next"],
        gpu_memory_utilization=0.5,
        memory=CudaMemory(torch.device("cpu")),
        max_num_seqs=5,
        num_speculative_tokens=2,
        num_state_snapshots=4,
    ) as runner:
        assert runner.kv_cache.spec.num_layers == 1
    window, state, kept = 3 * 80 * 4, 4 * 8 * 12 * 4, 3 * (80 + 8) * 4
    assert held == [2 * (5 * (window + state + kept) + 4 * (window + state))]
