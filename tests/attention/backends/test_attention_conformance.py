"""Every registered attention back end keeps the promises of all of them: a back end is tested by being registered.

It serves a batch as the plain reference does, or refuses it with a typed error that says what to do. The checks are in
`attention_conformance`; the end of this file breaks a back end in every way that they have to notice.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import static_attention
import torch
from attention_conformance import (
    GRAPHS,
    KINDS,
    LATENTS,
    OPTIONS,
    OVER_FLASHINFER,
    Bench,
    benches,
    check,
    check_graph_lanes,
    check_graph_refusals,
    check_lanes,
    check_none_is_ignored,
    check_others_values,
    check_replays,
    check_shared_block,
    check_steps,
    refused,
)
from flashinfer_cases import install
from flashinfer_standin import StandIns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention import AttentionShape
from attention.backends.torch import mla as torch_mla
from attention.backends.torch.sdpa import TorchAttentionBackend
from attention.backends.trtllm import mla_prefill
from attention.kernels import decode as decode_kernels
from ubatch import ConfigError, ForwardMode

pytestmark = pytest.mark.long

MIXED = KINDS["mixed"][0]
STORED: dict[str, dict[str, Any]] = {"plain": {}, "window": {"option": "window of one"}, "fp8": {"fp8": True}}
FEW_KINDS = ("decode", "mixed", "chain", "tree")
static_attention.register()  # one of a user's own: torch, but it can be captured
BENCHES = {f"{bench.name}-{'mla' if bench.mla else 'mha'}": bench for bench in benches()}
of_all = pytest.mark.parametrize("bench", BENCHES.values(), ids=list(BENCHES))
of_mha = pytest.mark.parametrize(
    "bench", [bench for bench in BENCHES.values() if not bench.mla], ids=[name for name in BENCHES if "mha" in name]
)


def cases(kinds: Iterable[str], served: Callable[[Bench, str], bool]) -> pytest.MarkDecorator:
    """Every back end with each kind of batch that it serves."""
    pairs = [(name, kind) for name, bench in BENCHES.items() for kind in kinds if served(bench, kind)]
    return pytest.mark.parametrize(
        ("bench", "kind"), [pytest.param(BENCHES[name], kind, id=f"{name}-{kind}") for name, kind in pairs]
    )


def takes(bench: Bench, kind: str) -> bool:
    """Whether it takes this kind's mask, if that has one."""
    return bench.traits.tree_mask or "tree" not in kind


def serves(bench: Bench, stored: str) -> bool:
    """Whether it serves one of `STORED`."""
    if stored == "fp8":
        return bench.traits.fp8
    return stored == "plain" or not (bench.mla or bench.lacks("window"))


def all_finite(bench: Bench, kind: str) -> bool:
    """Whether what others left need not be finite. flashinfer's kernels multiply the keys of padding queries by 0."""
    return kind != "draft extend" or bench.name not in OVER_FLASHINFER


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins in flashinfer's place; keys are split, and prefixes cut, although requests are short."""
    standins = StandIns(exact=True)
    install(monkeypatch, standins.find)
    monkeypatch.setattr(decode_kernels, "MIN_KEYS_PER_SPLIT", 16)
    monkeypatch.setattr(torch_mla, "_CHUNK_TOKENS", 32)
    monkeypatch.setattr(mla_prefill, "EXPANDED_TOKENS", 32)
    bench = getattr(request.node, "callspec", None) and request.node.callspec.params.get("bench")
    if isinstance(bench, Bench) and (reason := bench.why_not()):
        pytest.skip(reason)
    return standins


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@of_all
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch(bench: Bench, kind: str) -> None:
    requests, options = KINDS[kind]
    batch = bench.batch(requests, num_layers=2, **options)
    if "tree" in kind and not bench.traits.tree_mask:
        with refused(f"'{bench.kind.name}' takes no tree mask"):
            bench.make(batch).plan(batch.metadata)
    else:
        check(bench, batch)


@pytest.mark.sample(3)
@of_mha
@pytest.mark.parametrize("heads", [(2, 2, 8), (6, 1, 24), (40, 2, 16)], ids=["mha", "mqa", "wide groups"])
def test_heads(bench: Bench, heads: tuple[int, int, int]) -> None:
    check(bench, bench.batch([(9, 1), (4, 5)], heads=heads))
    check(bench, bench.batch([(9, 1), (17, 1)], heads=heads))


@pytest.mark.sample(2)
@cases(LATENTS, lambda bench, kind: bench.mla and (bench.name not in OVER_FLASHINFER or kind in ("halves", "scale")))
@pytest.mark.parametrize("requests", [KINDS["decode"][0], MIXED], ids=["decode", "mixed"])
def test_latents(bench: Bench, kind: str, requests: list[tuple[int, int]]) -> None:
    check(bench, bench.batch(requests, num_layers=2, **LATENTS[kind]))


@pytest.mark.sample(4)
@of_mha
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_every_option_is_served_or_refused_by_name(bench: Bench, option: str, kind: str) -> None:
    requests, options = KINDS[kind]
    batch = bench.batch(requests, option=option, **options)
    check_none_is_ignored(batch)
    if bench.lacks(option):
        with refused(rf"'{bench.kind.name}' has no \w+\. Choose another"):
            bench.make(batch)
    elif kind != "tree" or bench.traits.tree_mask:
        check(bench, batch)


@pytest.mark.sample(3)
@of_all
@pytest.mark.parametrize("size", [1, 4, 16, 32, 64, 128])
def test_page_sizes(bench: Bench, size: int) -> None:
    batch = bench.batch([(130, 1), (63, 2), (0, 66), (127, 1), (64, 1)], block_size=size, padding=1)
    taken = bench.traits.block_sizes
    if taken is not None and size not in taken:
        with refused(f"takes pages of {', '.join(map(str, taken))} tokens, not {size}"):
            bench.make(batch)
    else:
        check(bench, batch)


@pytest.mark.sample(3)
@of_all
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("tree of one", "nothing")])
def test_an_fp8_cache_is_read_with_its_scales_or_refused(bench: Bench, kind: str) -> None:
    requests, options = KINDS[kind]
    batch = bench.batch(requests, num_layers=2, fp8=True, **options)
    if not bench.traits.fp8:
        with refused(f"'{bench.kind.name}' cannot read an fp8 cache"):
            bench.make(batch)
    elif kind != "tree" or bench.traits.tree_mask:
        check(bench, batch)


@pytest.mark.sample(2)
@of_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_or_refused(bench: Bench, dtype: torch.dtype) -> None:
    batch = bench.batch(MIXED)
    if bench.name == "native" and dtype is torch.float16:
        with refused("'native' reads caches of float32 or bfloat16"):
            bench.make(batch.to(dtype))
    else:
        check(bench, batch, dtype, tolerance=6e-2)


@of_all
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=5),
    place=st.integers(0, 2),
    drawn=st.fixed_dictionaries(
        {
            "option": st.sampled_from([None, *OPTIONS]),
            "mode": st.sampled_from([None, ForwardMode.DRAFT_EXTEND]),
            "drafts": st.sampled_from([None, None, "chain", "tree"]),
            "fp8": st.booleans(),
            "padding": st.integers(0, 2),
            "seed": st.integers(0, 99),
        }
    ),
)
def test_any_batch(bench: Bench, requests: list[tuple[int, int]], place: int, drawn: dict[str, Any]) -> None:
    requests, options = [(prefix if new else 0, new) for prefix, new in requests], dict(drawn)
    if options["drafts"] and requests and takes(bench, options["drafts"]):
        number = requests[0][1] or 3
        requests = [*((prefix, number) for prefix, _ in requests), *[(0, 0)] * options["padding"]]
        options["mode"] = None
    else:
        options["drafts"] = None
    if bench.mla or (options["option"] and bench.lacks(options["option"])):
        options["option"] = None
    options["fp8"] = options["fp8"] and bench.traits.fp8
    sizes = bench.traits.block_sizes or (1, 4, 16)
    check(bench, bench.batch(requests, block_size=sizes[place % len(sizes)], **options))


@pytest.mark.sample(4)
@cases(KINDS, lambda bench, kind: takes(bench, kind) and all_finite(bench, kind))
@pytest.mark.parametrize("option", ["plain", "window", "fp8"])
def test_what_others_left_in_the_cache_reaches_no_result(bench: Bench, kind: str, option: str) -> None:
    requests, options = KINDS[kind]
    if serves(bench, option):
        check_others_values(bench, bench.batch(requests, **options, **STORED[option]))


@of_all
def test_a_step_finds_what_the_steps_before_it_wrote(bench: Bench) -> None:
    check_steps(bench)


@of_all
def test_a_request_reads_what_another_writes_in_this_step(bench: Bench) -> None:
    check_shared_block(bench)


@of_mha
@pytest.mark.parametrize("sinks", [False, True])
def test_sinks_that_the_shape_does_not_expect_are_refused(bench: Bench, sinks: bool) -> None:
    if sinks and not bench.traits.sinks:
        return
    batch: Any = bench.batch(MIXED, shape=AttentionShape(4, 2, 8, sinks=sinks)).on(bench.device)
    wrong = replace(batch, sinks=None if sinks else torch.zeros(4, device=bench.device))
    with refused(f"AttentionShape.sinks is {sinks}, but sinks were {'not ' if sinks else ''}given"):
        wrong.forward(bench.make(batch).plan(batch.metadata))


@of_all
def test_making_one_allocates_nothing_and_a_workspace_is_kept(bench: Bench) -> None:
    """And it may be made in inference mode, but used outside of it."""
    batch = bench.batch([(40, 1), (70, 1), (5, 2)]).on(bench.device)
    backend = bench.make(batch)
    assert backend.nbytes == 0
    with torch.inference_mode():
        backend.plan(batch.metadata)
        batch.forward(backend.plan(batch.metadata))
    held = backend.nbytes
    batch.forward(backend.plan(batch.metadata))
    assert backend.nbytes == held


# -- lanes -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@of_all
@pytest.mark.parametrize("edges", [(2,), (5,), (1, 4, 9)], ids=str)
def test_lanes_give_what_the_whole_batch_gives(bench: Bench, edges: tuple[int, ...], kernels: StandIns) -> None:
    """Cut between requests and through them: what one lane writes, the next one reads."""
    batch = bench.batch([(20, 1), (6, 9), (0, 5), (33, 1)], num_layers=2, padding=1)
    check_lanes(bench, batch, edges, kernels)


@pytest.mark.parametrize("drafts", ["chain", "tree"])
@of_all
def test_drafts_in_lanes(bench: Bench, drafts: Any, kernels: StandIns) -> None:
    if drafts == "chain" or bench.traits.tree_mask:
        check_lanes(bench, bench.batch([(20, 3), (7, 3), (33, 3)], drafts=drafts), (3,), kernels)


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@cases(GRAPHS, lambda bench, kind: bench.traits.graphs and takes(bench, kind))
@pytest.mark.parametrize("option", STORED)
def test_a_captured_plan_serves_longer_and_other_batches_in_place(bench: Bench, kind: str, option: str) -> None:
    if serves(bench, option):
        check_replays(bench, kind, **STORED[option])


@pytest.mark.sample(2)
@cases(GRAPHS, lambda bench, kind: bench.traits.graphs and takes(bench, kind) and all_finite(bench, kind))
def test_what_others_left_reaches_no_result_of_a_captured_plan(bench: Bench, kind: str) -> None:
    num_queries, options, (_, later, _) = GRAPHS[kind]
    check_others_values(bench, bench.padded(later, 4, num_queries, **options), captured=True)


@cases(["chain"], lambda bench, _: bench.traits.graphs)
def test_captured_lanes(bench: Bench, kind: str, kernels: StandIns) -> None:
    check_graph_lanes(bench, kernels)


@of_all
def test_what_a_graph_cannot_run_is_refused(bench: Bench) -> None:
    check_graph_refusals(bench)


# -- back ends that break a promise ------------------------------------------------------------------------------------


def break_torch(
    patch: pytest.MonkeyPatch, *, shape: dict[str, Any] | None = None, seen: Any = None, result: Any = None
) -> None:
    """Have `torch` plan for another shape or other metadata, or give other results."""
    plan_rightly = TorchAttentionBackend.plan

    def plan(backend: Any, metadata: Any) -> Any:
        patch.setattr(backend, "shape", replace(backend.shape, **(shape or {})))
        made: Any = plan_rightly(backend, metadata if seen is None else seen(metadata))
        forward = made.forward
        if result is not None:
            made.forward = lambda *args: result(forward, backend, metadata, *args)
        return made

    patch.setattr(TorchAttentionBackend, "plan", plan)


def write_nothing(forward: Any, backend: Any, metadata: Any, *args: Any) -> Any:
    pools = [pool.memory for pool in backend.kv_cache._pools]
    before = [memory.clone() for memory in pools]
    out = forward(*args)
    for memory, old in zip(pools, before, strict=True):
        memory.copy_(old)
    return out


def leave_padding(forward: Any, backend: Any, metadata: Any, *args: Any) -> Any:
    out = forward(*args).clone()
    out[metadata.num_actual_tokens :] = 1e-7  # too little for a tolerance
    return out


SHARED = torch.zeros(9)


def share_memory(forward: Any, backend: Any, metadata: Any, *args: Any) -> Any:
    backend.memory = SHARED
    return forward(*args)


def in_lanes(bench: Bench, batch: Any) -> None:
    check_lanes(bench, batch, (2,), StandIns())


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "ignores the window": ({"shape": {"sliding_window": None}}, {"option": "window"}, check),
    "ignores the soft cap": ({"shape": {"soft_cap": None}}, {"option": "soft cap"}, check),
    "ignores the scale": ({"shape": {"scale": None}}, {"option": "scale"}, check),
    "drops sinks": (
        {"result": lambda forward, backend, metadata, *args: forward(*args[:4], torch.full_like(args[4], -torch.inf))},
        {"option": "sinks"},
        check,
    ),
    "forgets prefixes": (
        {"seen": lambda of: replace(of, seq_lens=of.query_start_loc.diff(), seq_lens_cpu=of.query_lens_cpu)},
        {},
        check,
    ),
    "takes a tree for a chain": ({"seen": lambda of: replace(of, spec_verify=None)}, {"drafts": "tree"}, check),
    "writes nothing": ({"result": write_nothing}, {}, check),
    "writes to layer 0": (
        {"result": lambda forward, backend, metadata, q, k, v, layer, sinks: forward(q, k, v, 0, sinks)},
        {"num_layers": 2},
        check,
    ),
    "is one row off": ({"result": lambda forward, backend, metadata, *args: forward(*args).roll(1, 0)}, {}, check),
    "leaves padding": ({"result": leave_padding}, {"padding": 2}, check),
    "ignores fp8 scales": (
        {"result": lambda forward, backend, _, *args: forward(*args) / backend.kv_cache.scales(args[3])[1]},
        {"fp8": True},
        check,
    ),
    "reads what is not its own": (
        {"result": lambda forward, backend, _, *args: forward(*args) + 0 * backend.kv_cache.key_pool.memory.sum()},
        {},
        check_others_values,
    ),
    "shares memory between lanes": ({"result": share_memory}, {}, in_lanes),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_back_end_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, options, does = BROKEN[how]
    bench = BENCHES["torch-mha"]
    batch = bench.batch([(17, 4), (2, 4)], **options)
    does(bench, batch)
    break_torch(monkeypatch, **broken)
    with pytest.raises(AssertionError):
        does(bench, batch)


@pytest.mark.parametrize("how", ["forgets", "moves"])
def test_a_graph_that_is_not_replanned_in_place_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the batch that it was captured with; or a tensor is made anew."""
    rightly, done = static_attention.StaticAttention.replan, []

    def replan(backend: Any, plan: Any, metadata: Any) -> None:
        if how == "moves":
            plan.buffers.seq_lens = plan.buffers.seq_lens.clone()
        if how == "moves" or not done:
            rightly(backend, plan, metadata)
        done.append(metadata)

    monkeypatch.setattr(static_attention.StaticAttention, "replan", replan)
    with pytest.raises(AssertionError):
        check_replays(BENCHES["static_torch-mha"], "decode")


def test_a_back_end_that_drops_what_it_lacks_is_noticed() -> None:
    """It refuses nothing, or says nothing of what to do."""
    with pytest.raises(pytest.fail.Exception), refused("takes no tree mask"):
        pass
    with pytest.raises(AssertionError, match="no advice"), refused("no"):
        raise ConfigError("no")
