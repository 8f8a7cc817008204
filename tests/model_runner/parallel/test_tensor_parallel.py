"""Attention shared by ranks, on one rank: who has which rows and weights, what lanes know, what is refused.

And on two: ranks of a replica get the same tokens and drafts, even where what they compute differs.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from drafted import generate_drafted
from hypothesis import given
from hypothesis import strategies as st
from layer_times import efficiency_of, scaled
from repository import ROOT, TINY_MOE
from request_steps import admitted
from torch import Tensor

from attention import AttentionShape, MLAShape
from model_runner import (
    Acceptance,
    Checkpoint,
    ModelConfig,
    ModelRunner,
    Request,
    SamplingParams,
    ScheduledRequest,
    TensorParallelMismatch,
    WrongShape,
    check_tensor_parallel,
    generate,
    model_class,
    register_model,
    split_cost,
)
from model_runner.decoder import scatter
from model_runner.decoder.scatter import current_layout
from model_runner.models import DecoderLM, registry
from model_runner.parallel.tensor_parallel import (
    Shard,
    TensorParallel,
    make_tensor_parallel,
    padded_len,
    share_rows,
    share_tokens,
    valid_rows,
)
from model_runner.step.batch import build_input_batch
from model_runner.step.dp import check_same_requests, content_of, coordinate_batch_across_dp, plan_step
from model_runner.weights.weights import Part
from ranks import run_ranks
from serving.cli import main
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from serving.workbench.arms.stages import layer_times
from tests.support.shaped_steps import shaped_step
from ubatch import (
    SCHEDULES,
    CommGroup,
    ConfigError,
    Decision,
    ForwardContext,
    ForwardMode,
    Offer,
    Point,
    Schedule,
    UBatchConfig,
    UBatchSlice,
    Wish,
    decide,
    fingerprint,
    set_forward_context,
)
from ubatch.schedules import Compute, Launch, LayerTimes, Op, Pass, Wait, layer_program, search_schedules, simulate
from ubatch.schedules.schedule import KNOWN_POINTS
from ubatch.schedules.vote import decode_offer, encode_offer

pytestmark = pytest.mark.long

DECODE, PREFILL = fingerprint(ForwardMode.DECODE), fingerprint(ForwardMode.PREFILL)
SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=16)


path = checkpoint_fixture(make_checkpoint, "Qwen3Moe", num_hidden_layers=2)


# -- rows ---------------------------------------------------------------------------------------------------------


def test_padding() -> None:
    assert [padded_len(count, 4) for count in (0, 1, 3, 4, 5)] == [0, 4, 4, 4, 8]
    # A batch of 10 rows, cut at 6, with so many tokens: min(split, n) and max(0, n - split).
    assert [valid_rows(count, slice(0, 6)) for count in (0, 4, 6, 9, 10)] == [0, 4, 6, 6, 6]
    assert [valid_rows(count, slice(6, 10)) for count in (0, 4, 6, 9, 10)] == [0, 0, 0, 3, 4]
    assert share_tokens((5, 5, 0, 0, 1, 1), 2) == (3, 2, 0, 0, 1, 0)
    assert share_tokens((1,) * 4, 4) == (1, 0, 0, 0)
    assert share_tokens((5, 6), 1) == (5, 6)


@given(st.integers(0, 40), st.integers(1, 8))
def test_shares_are_equal_rows_that_hold_all_tokens(num_tokens: int, size: int) -> None:
    shares = [share_rows(num_tokens, rank, size) for rank in range(size)]
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == padded_len(num_tokens, size) < num_tokens + size
    assert len({share.stop - share.start for share in shares}) == 1
    assert sum(share_tokens([num_tokens] * size, size)) == num_tokens


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_head_is_somewhere(size: int) -> None:
    local = Shard(0, size).grouped(SHAPE)
    assert (local.num_heads, local.num_kv_heads) == (8 // size, max(1, 2 // size))
    queries, keys = [], []
    for rank in range(size):
        shard = Shard(rank, size)
        part, kv_part = shard.part(8 * 16), shard.part(2 * 16, most=2)
        assert (part.size, kv_part.size) == (local.num_heads * 16, local.num_kv_heads * 16)
        queries += range(part.start, part.start + part.size)
        keys.append(kv_part.start // 16)
        first_head = part.start // 16
        assert kv_part.start // 16 == first_head // SHAPE.group_size, "the key head of its query heads"
    assert queries == list(range(8 * 16))
    assert keys == [0, 0, 0, 0, 1, 1, 1, 1][:: 8 // size][:size]
    latent = Shard(0, size).attention(MLAShape(8, 24, 12, 8, 10))
    assert latent == MLAShape(8 // size, 24, 12, 8, 10)


def test_parts_are_read_alone(path: Path) -> None:
    checkpoint = Checkpoint(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = checkpoint.load(name, 64, 48)
    assert torch.equal(checkpoint.load(name, Part(16, 16, 64), 48), whole[16:32])
    assert torch.equal(checkpoint.load(name, 64, Part(24, 8, 48)), whole[:, 24:32])
    fused = checkpoint.load_fused([(name, Part(0, 32, 64)), (name.replace("q_", "k_"), 32)], 48)
    assert torch.equal(fused[:32], whole[:32])
    assert fused.shape == (64, 48)
    with pytest.raises(WrongShape) as caught:
        checkpoint.load(name, Part(0, 16, 32), 48)
    assert (caught.value.got, caught.value.expected) == ((64, 48), (32, 48))


# -- the vote -------------------------------------------------------------------------------------------------------


def offers(*contents: int, tokens: int = 5) -> list[Offer]:
    return [Offer(Wish.YES, (tokens - 2, 2), 2, schedule=1, mode=PREFILL, content=content) for content in contents]


def test_ranks_of_a_replica_run_the_same() -> None:
    assert decode_offer(encode_offer(offers(77)[0])) == offers(77)[0]
    check_same_requests(decide(offers(7, 7, 8, 8)), 2)
    for wrong in (decide(offers(7, 7, 8, 9)), decide([*offers(7, 7, 8), *offers(8, tokens=4)])):
        assert wrong.engaged
        with pytest.raises(TensorParallelMismatch, match=r"ranks 2 and 3 of the group are one replica"):
            check_same_requests(wrong, 2)
        check_same_requests(wrong, 1)
    assert decide(offers(0, 0)).contents == ()


def test_a_fingerprint_of_what_runs() -> None:
    request = Request("a", [1, 2, 3], SamplingParams())
    base = content_of([ScheduledRequest(request, 3)])
    assert base == content_of([ScheduledRequest(Request("b", [1, 2, 3], SamplingParams()), 3)])
    others = [content_of([]), content_of([ScheduledRequest(request, 2)])]
    others.append(content_of([ScheduledRequest(Request("a", [1, 2, 4], SamplingParams()), 3)]))
    request.num_computed_tokens = 2
    others += [content_of([ScheduledRequest(request, 1)]), content_of([ScheduledRequest(request, 1, (5,))])]
    others += [content_of([ScheduledRequest(request, 1, **state)]) for state in ({"keep": 0}, {"restore": 0})]
    assert len({base, *others, 0}) == len(others) + 2


# -- what a lane knows ----------------------------------------------------------------------------------------------


def test_every_lane_knows_the_buffers(path: Path) -> None:
    """Of 7 tokens in lanes of 4 and 3, on the second of two replicas of two ranks; the first one has 1 and 1."""
    with ModelRunner(path, num_kv_blocks=16) as runner:
        requests = admitted(runner, [[1] * 4, [1] * 3])
        shares = [ScheduledRequest(request, request.num_tokens) for request in requests]
        batch = build_input_batch(shares, runner.request_table, runner.kv_cache.spec)
        slices = (UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(1, 2), slice(4, 7)))
        decision = Decision(True, None, None, ((1, 1), (1, 1), (4, 3), (4, 3)), modes=(PREFILL,) * 4)
        step = plan_step(replace(batch, decision=decision, slices=slices), runner.attention, Shard(0, 2))
        known = [
            (c.num_tokens, c.local_dp_buffer_len, c.global_dp_buffer_len, c.tokens_across_ranks, c.global_mode)
            for c in step.contexts
        ]
        assert known == [(4, 4, 6, (1, 0, 2, 2), ForwardMode.PREFILL), (3, 4, 6, (1, 0, 2, 1), ForwardMode.PREFILL)]

        idle = build_input_batch([], runner.request_table, runner.kv_cache.spec)
        decode = Decision(False, None, None, ((3,), (3,), (0,), (0,)), modes=(DECODE, DECODE, PREFILL, PREFILL))
        (context,) = plan_step(replace(idle, decision=decode), runner.attention, Shard(0, 2)).contexts
        assert (context.mode, context.global_mode) == (ForwardMode.IDLE, ForwardMode.DECODE)
        assert (context.num_tokens, context.local_dp_buffer_len, context.global_dp_buffer_len) == (0, 0, 4)
        assert context.tokens_across_ranks == (2, 1, 0, 0)
        mixed = replace(decode, tokens=((3,), (3,), (1,), (1,)))
        (context,) = plan_step(replace(idle, decision=mixed), runner.attention, Shard(0, 2)).contexts
        assert context.global_mode is None


# -- refusals -------------------------------------------------------------------------------------------------------


class WholeLM(DecoderLM):
    """Does not move rows."""

    serves_tensor_parallel = False

    @classmethod
    def read_config(cls, config: Any, generation: Any) -> Any:
        """As Qwen3-MoE."""
        return model_class("Qwen3MoeForCausalLM").read_config(config, generation)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry._MODELS, "_targets", dict(registry._MODELS._targets))


@pytest.mark.usefixtures("own_registry")
def test_refusals(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ModelRunner(path, num_kv_blocks=4) as runner:
        config: ModelConfig = runner.config
        assert runner.tensor_parallel is None
        assert runner.tensor_parallel_size == 1
        assert current_layout(None) is None
        with set_forward_context(ForwardContext(num_tokens=1)), pytest.raises(ConfigError, match="through ModelRunner"):
            current_layout(TensorParallel(None, None))  # type: ignore[arg-type]
        one, two = (split_cost(runner.model, tensor_parallel_size=size) for size in (1, 2))
        assert two.per_pair == one.per_pair / 2
    check_tensor_parallel(config, 4)
    cases: list[tuple[int, dict[str, Any], str]] = [
        (0, {}, "at least 1, not 0"),
        (3, {}, "does not divide its 4 attention heads"),
        (2, {"attention": AttentionShape(6, 3, 16)}, "does not divide its 3 key/value heads"),
        (4, {"intermediate_size": 42}, "the intermediate size 42 of its dense MLPs"),
    ]
    for size, changes, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_tensor_parallel(replace(config, **changes), size)
    sparse = replace(config, intermediate_size=42, moe=replace(config.moe, layers=frozenset({0, 1})))  # type: ignore[attr-defined, call-arg]
    check_tensor_parallel(sparse, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide the 1 ranks"):
        ModelRunner(path, tensor_parallel_size=2, num_kv_blocks=4)
    assert make_tensor_parallel(None, 1) is None

    register_model("WholeLM", f"{__name__}:WholeLM")
    alone = make_checkpoint(tmp_path, "Qwen3Moe", num_hidden_layers=1)
    file = alone / "config.json"
    file.write_text(file.read_text().replace("Qwen3MoeForCausalLM", "WholeLM"))
    with pytest.raises(ConfigError, match="its family does not serve tensor parallelism"):
        ModelRunner(alone, tensor_parallel_size=2, num_kv_blocks=4)
    words = ["serve", str(alone), "-tp", "2", "--enable-expert-parallel", "--load-format", "dummy", "--print-config"]
    assert main(words) == 2, "before a rank is started"
    assert "-tp: tensor_parallel_size 2 does not fit the model: its family" in capsys.readouterr().err


def test_a_vote_of_one_rank_has_no_content() -> None:
    agreed = coordinate_batch_across_dp(UBatchConfig(), shaped_step((4, 4), ForwardMode.PREFILL), None)
    assert agreed.decision.contents == ()


# -- the simulator --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gathers_and_scatters_are_simulated() -> None:
    times = LayerTimes(attn_prepare=1.0, attn_core=2.0, dispatch=0.5, experts=4.0, combine=0.7, shared=1.5)
    shared = replace(times, attn_gather=0.3, attn_scatter=0.4)
    schedule = SCHEDULES["mlp_shared_overlap"]
    named = [op.point for op in layer_program(shared, 1, schedule) if isinstance(op, Pass)]
    assert named[:4] == [Point.ATTN_GATHER, Point.ATTN_PREPARE, Point.ATTN_SCATTER, Point.SELECT]
    assert not any("attn_" in op.key for op in layer_program(times, 1, schedule) if isinstance(op, Launch | Wait))
    serial = simulate([layer_program(shared, 3, SCHEDULES["serial"])], SCHEDULES["serial"])
    assert serial.exposed_s == pytest.approx(3 * (0.3 + 0.4 + 0.5))  # the shared expert hides combine
    assert serial.communication_s == pytest.approx(3 * shared.communication_s)
    made = SCHEDULES["two_batch_tensor_parallel"]
    halves = [[layer_program(scaled(shared, 0.5), 20, each)] * 2 for each in (schedule, made)]
    assert efficiency_of(simulate(halves[0], schedule)) < 0.94
    assert efficiency_of(simulate(halves[1], made)) > 0.995
    off = replace(made, name="exposed", points_off=made.points_off | {Point.ATTN_GATHER, Point.ATTN_SCATTER})
    assert simulate(halves[1], off).exposed_s > simulate(halves[1], made).exposed_s + 0.9 * 20 * 0.7
    found = search_schedules(
        lambda lanes, chunks, cut: scaled(shared, 1 / lanes), 20, max_lanes=2, max_chunks=1, keep=1
    )
    assert found[0].efficiency > 0.995
    assert {Point.ATTN_GATHER, Point.ATTN_SCATTER}.isdisjoint(found[0].schedule.points_off)


def test_their_times_come_back_from_a_program() -> None:
    times = LayerTimes(1.9, 4.0, 0.5, 0.7, attn_prepare=1.0, shared=1.5, attn_gather=0.3, attn_scatter=0.4)
    program: list[Op] = []
    for op in layer_program(times, 3, Schedule("all")):  # as traced: behind every launch what the transport computed
        program += [op, Compute(0.25)] if isinstance(op, Launch) else [op]
    stages = layer_times(program)
    found = stages.times[""]
    assert stages.kinds == ("",) * 3
    # What the launch of attn_gather computes belongs to the stage before it, at the end of the layer before.
    assert sum(vars(found).values()) == pytest.approx(sum(vars(times).values()) + 4 * 0.25)
    assert (found.attn_gather, found.attn_scatter) == pytest.approx((0.3, 0.4))
    assert (found.dispatch, found.combine, found.shared) == pytest.approx((0.5, 0.7, 1.5))


def test_the_document_names_what_there_is() -> None:
    text = (ROOT / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| .*`(\w+)` \|$", text, re.MULTILINE)
    assert named == ["attn_gather", "qk_gather", "attn_scatter", "mlp_gather", "mlp_scatter", "final_gather"]
    assert set(named) <= set(KNOWN_POINTS)
    for schedule in SCHEDULES.values():
        assert set(named).isdisjoint(schedule.points_off), schedule.name
    for name in re.findall(r"`(comm_\w+)`", text):
        assert callable(getattr(scatter, name))


HEAD = TINY_MOE.parent / "tiny-moe-eagle"
ROOM: dict[str, Any] = {"kv_cache_memory": 8 << 20, "max_num_seqs": 4}
PROMPTS = [[(29 * index + 7 * place) % 300 + 3 for place in range(4 + 5 * index)] for index in range(4)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, logprobs=2)  # unseeded: each rank draws its own
PARAMS = [GREEDY, DRAWN, GREEDY, DRAWN]
DRAFTS = {
    "chains": SpeculationConfig(Algorithm.EAGLE, 3, 3, draft_model_path=HEAD, acceptance=Acceptance.REJECTION),
    "trees": SpeculationConfig(Algorithm.EAGLE, 5, 3, topk=2, draft_model_path=HEAD),
}

LEAST_STEPS = 4
"""A prefill, and three steps for the eleven other tokens if every draft is right, which depends on what is drawn."""


def on_a_rank(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    """The last rank's logits have nothing to do with the model; its drafts and tokens come from them, too."""
    shared: dict[str, Any] = {"group": CommGroup.from_process_group(timeout_s=20), "tensor_parallel_size": 2, **ROOM}
    dbo = UBatchConfig(dbo_decode_token_threshold=4, dbo_prefill_token_threshold=4)
    given: dict[str, list[list[int]]] = {}
    for name, drafts in {"plain": None, **DRAFTS}.items():
        with ModelRunner(TINY_MOE, dbo=dbo, **shared, **runner_options(drafts)) as runner:
            if rank == 1:
                astray(runner)
            if drafts is None:
                given[name] = [list(output.token_ids) for output in generate(runner, PROMPTS, PARAMS)]
            else:
                given[name] = [output.token_ids for output in generate_drafted(runner, PROMPTS, PARAMS, drafts)]
            assert runner.statistics().engaged >= LEAST_STEPS
    return given


def astray(runner: ModelRunner) -> None:
    vocab_size, noise = runner.config.vocab_size, torch.Generator().manual_seed(1)

    def compute_logits(hidden: Tensor) -> Tensor:
        return torch.randn(len(hidden), vocab_size, generator=noise)

    runner.model.compute_logits = compute_logits  # type: ignore[method-assign]


@pytest.mark.wide
def test_tokens_and_drafts_are_those_of_the_first_rank() -> None:
    with ModelRunner(TINY_MOE, **ROOM) as alone:
        wanted = [list(output.token_ids) for output in generate(alone, PROMPTS[::2], GREEDY)]
    first, second = run_ranks(on_a_rank, 2)
    assert first == second
    for name, tokens in first.items():
        assert tokens[::2] == wanted, name
        assert [len(own) for own in tokens] == [12] * 4, name
