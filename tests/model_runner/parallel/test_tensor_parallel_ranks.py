"""Attention shared by ranks: DP 1 x TP 2 and DP 2 x TP 2 give one rank's logits, in every mode, overlapped and not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from request_steps import admitted, prefill
from tensor_parallel_steps import (
    EAGER,
    STEPS,
    TENSOR_PARALLEL_POINTS,
    Played,
    check_logits,
    hidden_share,
    lane_points,
    make_runner,
    play_all,
)
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, TensorParallelMismatch, generate
from model_runner.decoder.scatter import Layout, ScatterMode
from model_runner.parallel.tensor_parallel import make_tensor_parallel, padded_len, share_tokens
from moe import EmulatedLink
from ranks import run_ranks
from ubatch import (
    SCHEDULES,
    CommGroup,
    ConfigError,
    PeerFailed,
    Point,
    UBatchConfig,
    get_forward_context,
    interleave,
    tracing,
)
from ubatch.schedules import Launch, LayerTimes, Op, Pass, Wait, layer_program, programs_of
from ubatch.trace.spans import SpanKind

pytestmark = pytest.mark.ranks

MLPS = {"Qwen3Moe": "sds", "DeepseekV3": "dss", "Llama": "ddd", "Olmoe": "nn"}
"""Family -> its layers, see `lane_points`. DeepSeek's has latent attention and shared experts, Llama's has biases."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},  # fewer than ranks
    "Olmoe": {"num_hidden_layers": 2},
}
SCHEDULE = {
    "two lanes": "mlp_shared_overlap",
    "five stages": "two_batch_decode",
    "made for it": "two_batch_tensor_parallel",
}
ALONE: dict[str, dict[str, Any]] = {"off": {}}
ARMS = ALONE | {arm: {"dbo": UBatchConfig(**EAGER, schedule=name)} for arm, name in SCHEDULE.items()}
MOE_ARMS = {
    "gathered": {"dbo": UBatchConfig(**EAGER), "all2all_backend": "allgather_reducescatter"},
    "single": {"dbo": UBatchConfig(**EAGER, schedule="single_batch")},
    "three lanes": {"dbo": UBatchConfig(num_ubatches=3, dbo_decode_token_threshold=3, dbo_prefill_token_threshold=3)},
}
BUSY_STEPS = len(STEPS) - 1


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("shared")
    return {name: str(make_checkpoint(folder / name, name, **OVERRIDES.get(name, {}))) for name in MLPS}


def play_alone(paths: dict[str, str], replica: int, idle: tuple[int, ...] = ()) -> dict[str, Played]:
    """What one rank makes of a replica's script."""
    played = play_all(replica, 1, paths, ALONE, 1, {replica: idle})
    return {family: played[family, "off"] for family in paths}


def check_overlap(played: Played, schedule: str, mlps: str, what: object) -> None:
    """Every step ran in two lanes, in the order that the schedule gives, and gathers and scatters were hidden."""
    chosen = SCHEDULES[schedule]
    assert played.engaged == BUSY_STEPS, (what, played.declined)
    assert played.lanes == [2] * BUSY_STEPS, what
    assert played.order == interleave([lane_points(chosen, mlps)] * 2, lead=chosen.lead) * BUSY_STEPS, what
    assert hidden_share(played.spans) > 0.7, what  # not those of the first stages and the last


@pytest.mark.parametrize(
    "families", [("DeepseekV3", "Llama", "Olmoe"), pytest.param(("Qwen3Moe",), marks=pytest.mark.slow)], ids=" ".join
)
def test_two_ranks_of_one_replica(families: tuple[str, ...], paths: dict[str, str]) -> None:
    these = {family: paths[family] for family in families}
    expected = play_alone(these, 0)
    ranks = run_ranks(play_all, 2, these, ARMS, 2, {})
    for rank, results in enumerate(ranks):
        for (family, arm), played in results.items():
            what = rank, family, arm
            check_logits(played, expected[family], what)
            if arm == "off":
                assert (played.engaged, played.order) == (0, []), what
            else:
                check_overlap(played, SCHEDULE[arm], MLPS[family], what)


@pytest.mark.slow
def test_other_transports_and_schedules(paths: dict[str, str]) -> None:
    sparse = {family: paths[family] for family in ("Qwen3Moe", "DeepseekV3", "Olmoe")}
    expected = play_alone(sparse, 0)
    for rank, results in enumerate(run_ranks(play_all, 2, sparse, MOE_ARMS, 2, {})):
        for (family, arm), played in results.items():
            check_logits(played, expected[family], (rank, family, arm))
            assert played.lanes == [{"gathered": 2, "single": 1, "three lanes": 3}[arm]] * BUSY_STEPS


def play_and_lay_out(
    rank: int, world_size: int, paths: dict[str, str], idle: dict[int, Sequence[int]]
) -> dict[tuple[str, str], Played]:
    check_layouts(rank)
    return play_all(rank, world_size, paths, ARMS, 2, idle)


def check_layouts(rank: int) -> None:
    """Rows from shares to all rows of the replica and back, where one replica has 5 tokens and the other 3, or none."""
    group = CommGroup.from_process_group(timeout_s=20)
    parallel = make_tensor_parallel(group, 2)
    assert parallel is not None
    assert (parallel.size, parallel.rank, parallel.dp_size, parallel.dp_rank) == (2, rank % 2, 2, rank // 2)
    assert parallel.group.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
    assert group.part(parallel.group.ranks) is parallel.group
    for wrong in ((rank, 4), (rank, rank), ((rank + 1) % 4, (rank + 2) % 4)):
        with pytest.raises(ConfigError, match=rf"rank {rank} asked for a part .* of the ranks \[0, 1, 2, 3\]"):
            group.part(wrong)
    for counts in ((5, 3), (5, 0), (0, 1)):
        rows = [torch.arange(1.0, count + 1)[:, None].repeat(1, 3) + 10 * dp for dp, count in enumerate(counts)]
        across = share_tokens([counts[0]] * 2 + [counts[1]] * 2, 2)
        padded = [padded_len(count, 2) for count in counts]
        mine = counts[parallel.dp_rank]
        layout = Layout(parallel, mine, padded[parallel.dp_rank])
        own = layout.own(rows[parallel.dp_rank])
        assert own.shape == (padded[parallel.dp_rank] // 2, 3)
        assert layout.share_tokens == across[rank] == int((own[:, 0] > 0).sum())

        here = layout.gather(own, ScatterMode.TP_ATTN_FULL, Point.ATTN_GATHER)
        assert torch.equal(here, rows[parallel.dp_rank])
        assert torch.equal(layout.scatter(here, ScatterMode.TP_ATTN_FULL, Point.ATTN_SCATTER), 2 * own)
        assert layout.gather(own, ScatterMode.SCATTERED, Point.MLP_GATHER) is own
        assert layout.scatter(own, ScatterMode.SCATTERED, Point.MLP_SCATTER) is own


@pytest.mark.slow
def test_two_replicas_of_two_ranks(paths: dict[str, str]) -> None:
    """The second replica is idle while the first decodes, mixes and verifies, and the other way round."""
    sparse = {family: paths[family] for family in ("Qwen3Moe", "DeepseekV3", "Olmoe")}
    idle = {0: (4,), 1: (1, 3)}
    expected = [play_alone(sparse, replica, idle[replica]) for replica in (0, 1)]
    ranks = run_ranks(play_and_lay_out, 4, sparse, idle)
    for rank, results in enumerate(ranks):
        for (family, arm), played in results.items():
            check_logits(played, expected[rank // 2][family], (rank, family, arm))
            assert [logits is None for logits in played.logits].count(True) == len(idle[rank // 2])
            if arm != "off":
                check_overlap(played, SCHEDULE[arm], MLPS[family], (rank, family, arm))


# -- what a rank holds, and what it is given ------------------------------------------------------------------------


def look_inside(rank: int, world_size: int, paths: dict[str, str]) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=20)
    seen: dict[str, Any] = {}
    for family, path in paths.items():
        with make_runner(path, group, 2, dbo=UBatchConfig(**EAGER), experts_backend="grouped") as runner:
            seen[family, "held"] = {name: weight.clone() for name, weight in plain_weights(runner).items()}
            seen[family, "kv"] = runner.kv_cache.spec.bytes_per_block
            seen[family, "rows"] = rows = []

            def attended(module: Any, args: tuple[Any, ...], rows: list[Any] = rows) -> None:
                context = get_forward_context()
                assert context is not None
                assert context.num_tokens == len(args[0])
                rows.append(("attention", len(args[0]), context.local_dp_buffer_len, context.global_dp_buffer_len))

            def routed(module: Any, args: tuple[Any, ...], rows: list[Any] = rows) -> None:
                x, _, topk_ids = args
                rows.append(("experts", len(x), (topk_ids >= 0).all(1).tolist(), bool((topk_ids >= 0).any(1).all())))

            *_, last = layers = list(runner.model.layers)  # type: ignore[union-attr, arg-type]
            for layer in layers:
                layer.attention.register_forward_pre_hook(attended)
                if layer is not last and hasattr(layer.mlp, "kernel"):  # which routes only the rows that are needed
                    layer.mlp.kernel.register_forward_pre_hook(routed)
            seen[family, "tokens"] = [list(output.token_ids) for output in generate(runner, PROMPTS, DRAWN)]
            seen[family, "size"] = runner.tensor_parallel_size
    return seen


def plain_weights(runner: ModelRunner) -> dict[str, Tensor]:
    """`layers.0.attention.qkv`, and `.qkv_bias`; the experts must have theirs as they were loaded."""
    named = runner.model.named_parameters()
    return {name.removesuffix(".weight").replace(".bias", "_bias"): weight for name, weight in named}


PROMPTS = [[5, 17, 99, 3, 42], [1, 2], list(range(20, 32))]
DRAWN = [SamplingParams(max_tokens=6, temperature=1.0, seed=seed) for seed in range(3)]
_COLUMNS = ("qkv", "qkv_bias", "q_up", "w_uk", "w_uv", "gate_up", "gate_up_bias")
SHARDED = {**dict.fromkeys(_COLUMNS, 0), "out": 1, "down": 1}
OF_ALL_HEADS = ("Olmoe.q_norm", "Olmoe.k_norm")
"""Weight -> the dimension along which ranks share it; of latent attention `down` is whole, as shared experts are."""


@pytest.mark.wide
def test_what_ranks_hold(paths: dict[str, str]) -> None:
    ranks = run_ranks(look_inside, 2, paths)
    for family, path in paths.items():
        with ModelRunner(path, num_kv_blocks=96, block_size=4, experts_backend="grouped") as alone:
            whole = plain_weights(alone)
            expected = generate(alone, PROMPTS, DRAWN)
            kv_bytes = alone.kv_cache.spec.bytes_per_block
            queries = alone.config.attention.num_heads * getattr(alone.config.attention, "head_dim", 0)
        one_kv_head = family == "Llama"
        for rank, seen in enumerate(ranks):
            assert seen[family, "size"] == 2
            assert seen[family, "tokens"] == [list(output.token_ids) for output in expected], (family, rank)
            share = 1.0 if family == "DeepseekV3" or one_kv_head else 0.5  # a latent has no heads
            assert seen[family, "kv"] == share * kv_bytes, family
            for name, held in seen[family, "held"].items():
                check_weight(family, name, held, whole[name], rank, queries)
            if family == "Llama":  # the ranks' outputs are added up
                assert [name for name in whole if "out_bias" in name or "down_bias" in name]
                missing = set(whole) - set(seen[family, "held"])
                assert missing == set() if rank == 0 else all("out_bias" in n or "down_bias" in n for n in missing)
        check_rows(family, [seen[family, "rows"] for seen in ranks])


def check_weight(family: str, name: str, held: Tensor, whole: Tensor, rank: int, queries: int) -> None:
    """`queries`: rows of the query projection."""
    part, dim, one_kv_head = name.rsplit(".", 1)[-1], None, family == "Llama"
    if ".kernel.experts" in name or f"{family}.{part}" in OF_ALL_HEADS:
        dim = 0
    elif ".shared_experts." not in name and not (".attention." in name and part.startswith("down")):
        dim = SHARDED.get(part)
    if dim is None:
        replicated = part == "qk_norm"  # one row per head that it has
        assert replicated or torch.equal(held, whole), name
    elif part.startswith("qkv"):
        heads, kv_heads = whole[:queries], whole[queries:]
        keys, values = kv_heads.chunk(2)
        own = [heads.chunk(2)[rank], *((keys, values) if one_kv_head else (keys.chunk(2)[rank], values.chunk(2)[rank]))]
        assert torch.equal(held, torch.cat(own)), name
    elif part.startswith("gate_up"):
        halves = [half.chunk(2)[rank] for half in whole.chunk(2)]
        assert torch.equal(held, torch.cat(halves)), name
    else:
        assert held.shape[dim] * 2 == whole.shape[dim], name
        assert torch.equal(held, whole.chunk(2, dim)[rank]), name


def check_rows(family: str, ranks: list[list[Any]]) -> None:
    """Attention gets the tokens of its lane; of the ranks' shares as many rows are routed, and no padding."""
    attended = [[entry for entry in rows if entry[0] == "attention"] for rows in ranks]
    assert attended[0] == attended[1]
    assert any(tokens % 2 for _, tokens, _, _ in attended[0]), "no lane was padded"
    for _, tokens, local, everywhere in attended[0]:
        assert local == everywhere == tokens + tokens % 2
    routed = [[entry for entry in rows if entry[0] == "experts"] for rows in ranks]
    assert bool(routed[0]) == (family != "Llama")
    for first, second in zip(*routed, strict=True):
        assert first[1] == second[1]
        chosen = first[2] + second[2]
        assert chosen == sorted(chosen, reverse=True), "padding lies behind the tokens"
        assert sum(chosen) in (len(chosen), len(chosen) - 1)
    padded = [not all(second[2]) for second in routed[1]]
    assert any(padded) == bool(routed[1])


# -- refusals and failures ------------------------------------------------------------------------------------------


def refuse_and_fail(rank: int, world_size: int, path: str, wide: str) -> None:
    group = CommGroup.from_process_group(timeout_s=10)
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide the 2 ranks"):
        make_runner(path, group, 4)
    with pytest.raises(ConfigError, match="does not divide the intermediate size 41 of its dense MLPs"):
        make_runner(wide, group, 2)

    with make_runner(path, group, 2, num_kv_blocks=96 - rank, dbo=UBatchConfig(**EAGER)) as runner:
        assert runner.kv_cache.num_blocks == 95, "what the smaller rank has"
        params = SamplingParams(max_tokens=4)
        expected = [output.token_ids for output in generate(runner, PROMPTS, params)]

        # One token differs: both ranks say so, before anything runs.
        prompts = [[*PROMPTS[0][:-1], 42 + rank], *PROMPTS[1:]]
        with pytest.raises(TensorParallelMismatch, match="ranks 0 and 1 of the group are one replica"):
            generate(runner, prompts, params)
        group.reset()
        assert [output.token_ids for output in generate(runner, PROMPTS, params)] == expected

        # Rank 1 fails in the middle of a layer, when rank 0 already waits in their own group.
        layer = runner.model.layers[1]  # type: ignore[index]
        forward = layer.attention.forward
        if rank == 1:
            layer.attention.forward = _fail
        with pytest.raises(PeerFailed if rank == 0 else ZeroDivisionError):
            generate(runner, PROMPTS, params)
        layer.attention.forward = forward
        runner.allocator.check(idle=True)
        assert runner.tensor_parallel is not None
        assert runner.tensor_parallel.group.broken is not None
        group.reset()
        assert runner.tensor_parallel.group.broken is None
        assert [output.token_ids for output in generate(runner, PROMPTS, params)] == expected


def _fail(*args: object) -> None:
    raise ZeroDivisionError


def test_refusals_and_failures(paths: dict[str, str], tmp_path: Path) -> None:
    wide = make_checkpoint(tmp_path / "wide", "Llama", num_hidden_layers=1, intermediate_size=41)
    run_ranks(refuse_and_fail, 2, paths["Qwen3Moe"], str(wide))


# -- an emulated link ------------------------------------------------------------------------------------------------


def over_a_link(rank: int, world_size: int, paths: dict[str, str]) -> dict[str, tuple[int, list[tuple[str, float]]]]:
    """Per family what the link carried in one step, and how long each gather and scatter took."""
    group = CommGroup.from_process_group(timeout_s=20)
    carried = {}
    for family, path in paths.items():
        link = EmulatedLink(LATENCY_S, 1e9)
        with make_runner(path, group, 2, link=link, dbo=UBatchConfig(enable_dbo=False)) as runner:
            requests = admitted(runner, PROMPTS[:1])
            with tracing() as trace:
                prefill(runner, requests)
        spans = [(span.name, span.end - span.start) for span in trace.spans if span.kind is SpanKind.TRANSFER]
        carried[family] = link.statistics().transfers, [each for each in spans if each[0] in TENSOR_PARALLEL_POINTS]
    return carried


LATENCY_S = 0.004


def test_an_emulated_link_carries_gathers_and_scatters(paths: dict[str, str]) -> None:
    """Also where nothing else travels: a dense model has no experts to reach."""
    for carried in run_ranks(over_a_link, 2, {family: paths[family] for family in ("Qwen3Moe", "Llama")}):
        for family, (transfers, spans) in carried.items():
            of_layers = {"s": 2, "d": 4}
            gathers = sum(of_layers[kind] for kind in MLPS[family]) + 1
            assert len(spans) == gathers, (family, spans)
            assert transfers == gathers + 2 * MLPS[family].count("s"), family
            assert all(seconds >= LATENCY_S for _, seconds in spans), spans


# -- the simulator ----------------------------------------------------------------------------------------------------


def outline_of_a_step(rank: int, world_size: int, path: str) -> list[list[tuple[str, str]]]:
    group = CommGroup.from_process_group(timeout_s=20)
    settings = {"dbo": UBatchConfig(**EAGER), "all2all_backend": "allgather_reducescatter"}  # exchanges no counts
    with make_runner(path, group, 2, **settings) as runner:
        requests = admitted(runner, PROMPTS)
        with tracing() as trace:
            prefill(runner, requests)
        return [outline(program) for program in programs_of(trace, 1)]


def outline(program: Sequence[Op]) -> list[tuple[str, str]]:
    """Launches, points and waits, without their times and numbers."""
    named: list[tuple[str, str]] = []
    for op in program:
        if isinstance(op, Launch | Wait):
            named.append((type(op).__name__, op.key.split(".")[0]))
        elif isinstance(op, Pass):
            named.append(("Pass", str(op.point)))
    return named


def test_the_simulator_knows_the_gathers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen3Moe", num_hidden_layers=2, mlp_only_layers=[])
    times = LayerTimes(attn_core=1.0, experts=1.0, dispatch=1.0, combine=1.0, attn_gather=1.0, attn_scatter=1.0)
    expected = outline(layer_program(times, 2, SCHEDULES["mlp_shared_overlap"]))
    last = [("Launch", "final_gather"), ("Pass", "final_gather"), ("Wait", "final_gather")]
    for lanes in run_ranks(outline_of_a_step, 2, str(path)):
        assert lanes == [expected + last] * 2
