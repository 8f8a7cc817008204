"""The DeepEP back ends where steps differ: `deepep_auto`'s choice, capture, SM budgets, pieces, failures, refusals."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import deep_ep_standin
import pytest
import torch
from deep_ep_standin_events import calls, place
from deepep_cases import (
    BACKENDS,
    EXPERTS,
    HIDDEN,
    ROOM,
    Stack,
    check_layer,
    close,
    lanes_of,
    layer_of,
    rows_of,
    run_checks,
    tokens_of,
    transport,
)
from torch import Tensor

from moe import FusedMoEModularKernel, make_all2all, make_experts
from ubatch import (
    CommGroup,
    ConfigError,
    ForwardContext,
    ForwardMode,
    SMBudget,
    UBatchError,
    dbo_current_ubatch_id,
    dbo_enabled,
    get_schedule,
    set_forward_context,
)
from ubatch.streams.graph_protocols import mark_capturing


def test_auto() -> None:
    run_checks(_the_vote_chooses, _no_vote)


def test_capture_and_budgets() -> None:
    run_checks(_synchronous_while_captured, _no_buffer_while_captured, _sm_budget)


@pytest.mark.wide
def test_a_failed_rank() -> None:
    run_checks(_after_a_failure)


def _kernels_called() -> set[str]:
    return {what for what, _, _ in calls if "dispatch" in what and "hook" not in what}


LOW, HIGH = {"low_latency_dispatch"}, {"dispatch"}
DECODE, PREFILL, VERIFY, IDLE = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE


def _the_vote_chooses(rank: int, group: CommGroup) -> None:
    """Both ranks always call the same kernels, and get the same tokens back as from torch_dist."""
    layer = layer_of()
    model = Stack([layer], transport("deepep_auto", group, max_tokens_per_rank=ROOM))
    wrapper = lanes_of(model, group, "mlp_shared_overlap")
    for tokens, modes, expected, engaged in (
        ((8, 6), (DECODE, DECODE), LOW, True),
        ((8, 6), (VERIFY, VERIFY), LOW, True),
        ((8, 6), (PREFILL, PREFILL), HIGH, True),
        ((0, 6), (IDLE, DECODE), LOW, True),  # a rank without tokens follows, whatever its own mode is
        ((6, 0), (PREFILL, DECODE), HIGH, True),
        ((8, 6), (DECODE, PREFILL), HIGH, False),
        ((1, 8), (DECODE, DECODE), LOW, False),  # too few for two lanes
        ((2 * ROOM + 2, 8), (DECODE, DECODE), HIGH, True),  # more than the buffers of the lanes have room for
    ):
        x = rows_of(tokens[rank], rank)
        calls.clear()
        before = wrapper.statistics().engaged
        with set_forward_context(ForwardContext(mode=modes[rank], num_tokens=tokens[rank])):
            close(wrapper(x), model.expected(x), f"{tokens} tokens, {modes}")
        assert _kernels_called() == expected, f"{tokens} tokens, {modes}"
        assert wrapper.statistics().engaged - before == engaged, f"{tokens} tokens, {modes}"
    wrapper.close()


def _no_vote(rank: int, group: CommGroup) -> None:
    layer = layer_of()
    all2all = transport("deepep_auto", group)
    routed = tokens_of(layer, 3 + rank, seed=rank)
    with (
        set_forward_context(ForwardContext(mode=DECODE)),
        pytest.raises(ConfigError, match="'deepep_auto' follows what the ranks voted on"),
    ):
        all2all.dispatch(routed.x, routed.ids, routed.weights)
    check_layer(layer.kernel(all2all), layer, routed, "outside any step")
    assert all2all.traits.batched, "the next step may bring batches"


def _synchronous_while_captured(rank: int, group: CommGroup) -> None:
    """While captured, nothing is marked or counted, and the answers are the same, in lanes and outside."""
    layer = layer_of()
    for name in ("deepep_high_throughput", "deepep_v2"):
        model = Stack([layer], transport(name, group, worst_case=True))
        for kernel in cast("list[FusedMoEModularKernel]", list(model.kernels)):
            kernel.experts.capturable = True  # type: ignore[misc]
        x = rows_of(6, rank)
        expected = model.expected(x)
        wrapper = lanes_of(model, group, "mlp_shared_overlap")
        close(wrapper(x), expected, name)
        calls.clear()
        with mark_capturing():
            close(wrapper(x), expected, f"{name}, captured in lanes")
            with set_forward_context(ForwardContext(tokens_across_ranks=(6, 6))):
                close(model(x), expected, f"{name}, captured unsplit")
        assert wrapper.statistics().engaged == 2
        assert not [what for what, _, _ in calls if what == "capture"]
        wrapper.close()


def _no_buffer_while_captured(rank: int, group: CommGroup) -> None:
    """Before anything is launched: what has no buffer yet, waits on the host, or reads on the host."""
    layer = layer_of()
    routed = tokens_of(layer, 4)
    kernels = {name: layer.kernel(transport(name, group)) for name in BACKENDS}
    with mark_capturing():
        low_latency = kernels["deepep_low_latency"]
        with pytest.raises(ConfigError, match=r"GroupedExperts cannot be captured .* read on the host"):
            low_latency(routed.x, routed.weights, routed.ids)
        for name in ("deepep_high_throughput", "deepep_v2"):
            with pytest.raises(ConfigError, match="cannot be captured into a CUDA graph, as it waits on the host"):
                kernels[name](routed.x, routed.weights, routed.ids)
        with pytest.raises(ConfigError, match="has no buffer for this lane and shape yet"):
            low_latency.all2all.dispatch(routed.x, routed.ids, routed.weights)
        worst_case = transport("deepep_high_throughput", group, worst_case=True)
        with pytest.raises(ConfigError, match="has no buffer for this lane and shape yet"):
            worst_case.dispatch(routed.x, routed.ids, routed.weights)


def _sm_budget(rank: int, group: CommGroup) -> None:
    """DeepEP takes an even share of the SMs reserved for communication, and combine as many as its dispatch."""
    layer = layer_of()
    routed = tokens_of(layer, 4, seed=rank)
    reported: dict[str, bool] = {}
    budgets: list[SMBudget | None] = [None]

    def report(name: str, *, obeys: bool) -> None:
        reported[name] = obeys

    made = [transport(f"deepep_{name}", group) for name in ("high_throughput", "v2", "low_latency")]
    shares = (None, 20, 24, None), (17, 16, 16, True), (1, 2, 2, False), (64, 20, 64, True)
    with (
        mock.patch.multiple("moe.all2all.deepep.base", current_sm_budget=lambda: budgets[-1], report_sm_use=report),
        mock.patch("moe.all2all.deepep.low_latency.report_sm_use", report),
    ):
        for total, taken, of_v2, obeys in shares:
            budgets.append(None if total is None else SMBudget(132, total))
            reported.clear()
            for all2all in made:
                check_layer(layer.kernel(all2all), layer, routed, f"{total} SMs")
            assert deep_ep_standin.Buffer.num_sms == taken  # at most what its buffer was made for
            elastic = made[1].dispatch(routed.x, routed.ids, routed.weights).wait()
            assert elastic.handle.route.num_sms == of_v2  # type: ignore[union-attr] # the stand-in's own choice is 24
            assert (reported.get("deepep_high_throughput"), reported.get("deepep_v2")) == (obeys, obeys)
            assert reported["deepep_low_latency"] is False, "its kernels cannot be told"
        budgets.append(SMBudget(132, 17))
        arrived: Any = made[0].dispatch(routed.x, routed.ids, routed.weights).wait()
        budgets.append(SMBudget(132, 1))
        results = torch.zeros(arrived.handle.layout[1], HIDDEN, dtype=torch.bfloat16)
        made[0].combine(results, arrived.handle).wait()  # the stand-in compares its SMs with the dispatch's
    deep_ep_standin.Buffer.set_num_sms(20)


def _fault_in_lane_1(run_expert: Callable[..., Tensor], armed: Callable[[], bool], slot: int, x: Tensor) -> Tensor:
    if armed() and dbo_enabled() and dbo_current_ubatch_id() == 1:
        raise ArithmeticError("a planted fault")
    return run_expert(slot, x)


def _after_a_failure(rank: int, group: CommGroup) -> None:
    """The caller gets the original error, the peer learns of it, and after a reset there are new buffers."""
    layer = layer_of()
    for name in ("deepep_high_throughput", "deepep_low_latency"):
        model = Stack([layer], transport(name, group))
        experts, armed = model.kernels[0].experts, mock.Mock(return_value=False)
        experts.run_expert = partial(_fault_in_lane_1, experts.run_expert, armed)
        wrapper = lanes_of(model, group, "mlp_shared_overlap")
        x = rows_of(6 + rank, rank)
        close(wrapper(x), model.expected(x), name)
        armed.return_value = rank == 0
        if rank == 1:
            place.patience_s = 1.5
        with pytest.raises(ArithmeticError if rank == 0 else (UBatchError, RuntimeError)):
            wrapper(x)
        armed.return_value, place.patience_s = False, 60.0
        group.reset()
        made = [what for what, _, _ in calls].count("make")
        close(wrapper(x), model.expected(x), f"{name} after the reset")
        assert [what for what, _, _ in calls].count("make") > made, "buffers of the old connection are not used again"
        wrapper.close()


# --------------------------------------------------------------------------------------------- without a rank


@contextmanager
def _one_of(ranks: int) -> Iterator[CommGroup]:
    """A group that nobody sends anything over."""
    group = cast(CommGroup, mock.create_autospec(CommGroup, instance=True))
    group.rank, group.size = 0, ranks
    with deep_ep_standin.installed():
        yield group


@pytest.mark.parametrize("name", [*BACKENDS, "deepep_auto"])
def test_deepep_must_be_there(name: str) -> None:
    with (
        _one_of(2) as group,
        mock.patch.dict(sys.modules, {"deep_ep": None}),
        pytest.raises(
            ConfigError, match=r"deep_ep cannot be imported \(ModuleNotFoundError.* needs DeepEP: build it from"
        ),
    ):
        make_all2all(name, group=group, num_experts=EXPERTS)
    with pytest.raises(ConfigError, match="needs a CommGroup, not NoneType"):
        make_all2all(name, group=None, num_experts=EXPERTS)


@pytest.mark.parametrize(
    ("name", "ranks", "options", "complaint"),
    [
        ("deepep_low_latency", 12, {}, "up to 8 ranks, or whole nodes of 8 each, not 12 ranks"),
        ("deepep_high_throughput", 3, {}, "no settings for 3 ranks: Unsupported number of EP"),
        ("deepep_high_throughput", 16, {"worst_case": True}, "inside one node of 8 ranks, but the group has 16"),
        ("deepep_low_latency", 16, {"share_buffer": False}, "share_buffer=False: beyond one node"),
        ("deepep_low_latency", 2, {"max_tokens_per_rank": 0}, "max_tokens_per_rank must be 1 to 511, not 0"),
        ("deepep_low_latency", 2, {"max_tokens_per_rank": 512}, "max_tokens_per_rank must be 1 to 511, not 512"),
        ("deepep_low_latency", 2, {"max_tokens_per_rank": 7}, "= 7 times 2 ranks must be a multiple of 4"),
        ("deepep_v2", 2, {"max_tokens_per_rank": 0}, "max_tokens_per_rank must be at least 1, not 0"),
    ],
)
def test_what_deepep_cannot_do_is_refused_at_once(
    name: str, ranks: int, options: dict[str, Any], complaint: str
) -> None:
    with _one_of(ranks) as group, pytest.raises(ConfigError, match=complaint):
        make_all2all(name, group=group, num_experts=4 * ranks, **options)


def test_what_follows_from_nodes_and_versions() -> None:
    with _one_of(16) as group:
        assert make_all2all("deepep_low_latency", group=group, num_experts=16).share_buffer  # type: ignore[attr-defined]
    old = mock.patch.dict(sys.modules, {"deep_ep": SimpleNamespace(__version__="1.2.1")})
    with _one_of(2) as group, old, pytest.raises(ConfigError, match=r"its ElasticBuffer; this one is 1\.2\.1"):
        make_all2all("deepep_v2", group=group, num_experts=8)


@pytest.mark.parametrize(
    ("name", "hidden", "top_k", "complaint"),
    [
        *((name, 0, 2, rf"'{name}' carries bfloat16 .* not torch\.float32") for name in BACKENDS),
        ("deepep_high_throughput", 2176, 2, "a multiple of 512 bytes, not hidden size 2176 in bfloat16"),
        ("deepep_v2", 2176, 2, "a multiple of 512 bytes, not hidden size 2176 in bfloat16"),
        ("deepep_low_latency", 2176, 2, r"compiled for hidden sizes \[2048, 2560.* not 2176"),
        ("deepep_low_latency", 2560, 12, "serves top_k up to 11, not 12"),
    ],
)
def test_what_deepep_cannot_carry_is_refused_before_launch(name: str, hidden: int, top_k: int, complaint: str) -> None:
    x = torch.zeros(5, hidden, dtype=torch.bfloat16) if hidden else torch.zeros(5, HIDDEN)
    ids = torch.zeros(5, top_k, dtype=torch.int64)
    with _one_of(2) as group:
        all2all = make_all2all(name, group=group, num_experts=EXPERTS)
        with pytest.raises(ConfigError, match=complaint):
            all2all.dispatch(x, ids, torch.rand(5, top_k))
        with pytest.raises(ConfigError, match=r"brings home contiguous bfloat16 results, not strided torch\.bfloat16"):
            all2all.combine(torch.zeros(2, 5, dtype=torch.bfloat16).t(), None)


def test_batches_need_experts_that_take_them() -> None:
    with _one_of(2) as group:
        low_latency = make_all2all("deepep_low_latency", group=group, num_experts=EXPERTS)
        experts = make_experts("grouped", torch.zeros(4, 6, 4), torch.zeros(4, 4, 3))
        FusedMoEModularKernel(low_latency, experts)
        rows_only = SimpleNamespace(expert_range=low_latency.experts)
        with pytest.raises(
            ConfigError, match="delivers rows in batches by expert, which SimpleNamespace does not take"
        ):
            FusedMoEModularKernel(low_latency, rows_only)  # type: ignore[arg-type]


LITTLE = 4
"""Room for so few tokens that a layer runs in pieces."""


def test_pieces() -> None:
    run_checks(_outside_lanes, _in_lanes, _nobody_voted)


def _backends(group: CommGroup, **options: Any) -> dict[str, Any]:
    names = ("deepep_low_latency", "deepep_v2")
    return {name: transport(name, group, max_tokens_per_rank=LITTLE, **options) for name in names}


def _outside_lanes(rank: int, group: CommGroup) -> None:
    """As many dispatches on every rank as the one with most tokens needs; an idle rank goes along."""
    layer = layer_of()
    for use_fp8 in (False, True):
        for name, all2all in _backends(group, use_fp8=use_fp8).items():
            kernel = layer.kernel(all2all)
            for tokens, pieces in (((11, 3), 3), ((0, 9), 3), ((4, 4), 1), ((5, 0), 2)):
                what = f"{name}, {tokens}"
                routed = tokens_of(layer, tokens[rank], seed=10 + rank, unrouted=0.2)
                calls.clear()
                with set_forward_context(ForwardContext(tokens_across_ranks=tokens)):
                    check_layer(kernel, layer, routed, what, use_fp8)
                assert len([call for call, _, _ in calls if call.endswith("dispatch") and "hook" not in call]) == pieces


def _in_lanes(rank: int, group: CommGroup) -> None:
    """Lanes pass the points of one piece, however many they run; each piece in chunks, too."""
    layers = [layer_of(seed) for seed in (0, 1)]
    lanes = get_schedule("mlp_shared_overlap")
    for name, all2all in _backends(group).items():
        model, roomy = Stack(layers, all2all), Stack(layers, transport(name, group, max_tokens_per_rank=32))
        x = rows_of(21 - 8 * rank, rank)
        in_one_piece = roomy(x)
        for schedule in (lanes, replace(lanes, name="in two chunks", chunks=2)):
            wrapper = lanes_of(model, group, schedule)
            close(wrapper(x), in_one_piece, f"{name}, {schedule.name}")
            assert wrapper.statistics().engaged == 1, wrapper.statistics()
            wrapper.close()


def _nobody_voted(rank: int, group: CommGroup) -> None:
    """Then no rank can know how many pieces the others have: what does not fit is refused, before it is launched."""
    layer = layer_of()
    routed = tokens_of(layer, LITTLE + 1)
    for name, all2all in _backends(group).items():
        with pytest.raises(ConfigError, match=f"'{name}' has room for 4 tokens of a rank at once, not 5"):
            layer.kernel(all2all)(routed.x, routed.weights, routed.ids)
