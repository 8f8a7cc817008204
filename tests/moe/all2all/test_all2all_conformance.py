"""Every registered all-to-all back end keeps the contract of `all2all_contract`, and one that breaks it is found."""

import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from all2all_bench import CASES, Bench, Case
from all2all_contract import CHECKS, check_case
from repository import TINY_MOE
from torch import Tensor

import moe
from model_runner.parallel.expert_parallel import make_transport
from moe import (
    All2All,
    BatchedDispatch,
    FusedMoEModularKernel,
    StepSizes,
    make_all2all,
    make_experts,
    register_all2all_backend,
)
from moe.all2all.allgather_reducescatter import AllGatherReduceScatterAll2All
from moe.all2all.host_loopback_batched import sort_pairs
from moe.all2all.local import LocalAll2All
from moe.all2all.registry import inheriting
from moe.all2all.torch_dist.torch_dist import TorchDistAll2All
from ranks import run_ranks
from serving.options import SERVE, read_layers, resolve_settings, to_engine_options
from ubatch import CommGroup, ConfigError, Transfer, dbo_current_ubatch_id, dbo_enabled, dbo_yield, launch_all_gather


def every_case() -> list[Any]:
    """Other options of a back end are wide."""
    return [pytest.param(name, marks=[pytest.mark.wide] if "," in name else []) for name in CASES]


@pytest.mark.wide_sample(1)
@pytest.mark.parametrize("name", every_case())
def test_contract(name: str) -> None:
    check_case(name)


# ----------------------------------------------------------------------------------------------------- broken back ends


class WithOtherTraits:
    """A transport that says `others` of itself."""

    others: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **place: Any) -> None:
        super().__init__(**place)
        self.traits = replace(self.traits, **self.others)


class Broken(WithOtherTraits, LocalAll2All):
    """`local`, with other traits."""


class LosesAToken(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        topk_ids = topk_ids.clone()
        topk_ids[-1:] = -1
        return super().dispatch(x, topk_ids, topk_weights)


class WeighsTwice(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        return super().dispatch(x, topk_ids, topk_weights.square())


class RoundsToBfloat16(Broken):
    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        return super().combine(y.bfloat16().to(y.dtype), handle)


class ReadsWithoutStrides(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        return super().dispatch(x.as_strided(x.shape, (x.shape[1], 1)), topk_ids, topk_weights)


class MixesTokens(Broken):
    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        return super().combine(torch.eye(len(y), dtype=y.dtype) @ y, handle)


class KeepsInferenceMemory(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        self.memory = getattr(self, "memory", torch.zeros(64, x.shape[1], dtype=x.dtype))
        self.memory[: len(x)] = x
        return super().dispatch(self.memory[: len(x)].clone(), topk_ids, topk_weights)


class KeepsOneHandle(Broken):
    """Whose combine goes by the dispatch before it."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        self.rows = len(x)
        return super().dispatch(x, topk_ids, topk_weights)

    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        return super().combine(torch.cat([y, y.new_zeros(self.rows, y.shape[1])])[: self.rows], handle)


class HandsOver(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        dbo_yield()
        return super().dispatch(x, topk_ids, topk_weights)


class SendsAllWithEveryChunk(Broken):
    def dispatch_chunks(self, x: Tensor, ids: Tensor, weights: Tensor, blocks: Sequence[range]) -> Any:
        return [self.dispatch(x, ids, weights) for _ in blocks]


class ClaimsSignals(Broken):
    others, may_signal = {"signals": True, "batched": True}, True


class ClaimsBlocks(Broken):
    others, may_signal = {"sends_blocks": True}, True


class SignalsUnannounced(Broken):
    others = {"sends_blocks": True}  # noqa: RUF012


class ClaimsPeers(Broken):
    others = {"other_ranks": 1}  # noqa: RUF012


class ReadsTheCounts(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        assert int(topk_ids.max()) is not None
        return super().dispatch(x, topk_ids, topk_weights)


class NotYetThere(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        arrived = super().dispatch(x, topk_ids, topk_weights).wait()
        transfer = Transfer("dispatch", (), lambda: arrived, bytes_sent=1)
        transfer.delay_until(time.monotonic() + 0.05)
        return transfer


class BatchesUnannounced(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        sorted_ = sort_pairs(x, topk_ids, self.num_experts)
        arrived = BatchedDispatch(sorted_.hidden_states, sorted_.rows_per_expert, None, None, self.experts)
        return Transfer.ready(arrived, "dispatch")


class LimitsUnannounced(Broken):
    others = {"max_tokens": 5}  # noqa: RUF012


class LosesGradients(Broken):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        return super().dispatch(x.detach(), topk_ids, topk_weights)


class TakesWhatever(Broken):
    """Gradients and all dtypes, though it says that it sends them."""

    others = {"is_async": True}  # noqa: RUF012


class TakesAnyOption(Broken):
    def __init__(self, *, group: CommGroup | None, num_experts: int, **options: object) -> None:
        super().__init__(group=group, num_experts=num_experts)


BROKEN: dict[type[All2All[Any]], str] = {
    LosesAToken: "results",
    WeighsTwice: "results",
    RoundsToBfloat16: "dtypes",
    ReadsWithoutStrides: "strided_inputs",
    MixesTokens: "tokens_apart",
    KeepsInferenceMemory: "inference_mode_and_outside",
    KeepsOneHandle: "several_under_way",
    HandsOver: "lanes",
    SendsAllWithEveryChunk: "chunks",
    ClaimsSignals: "signalled",
    ClaimsBlocks: "signalled",
    SignalsUnannounced: "signalled",
    ClaimsPeers: "traits",
    ReadsTheCounts: "traits",
    NotYetThere: "traits",
    BatchesUnannounced: "traits",
    LimitsUnannounced: "room",
    LosesGradients: "refusals",
    TakesWhatever: "refusals",
    TakesAnyOption: "makers",
}
"""What breaks the contract, and the check that has to find it."""


def place_of(broken: type) -> str:
    return f"{broken.__module__}:{broken.__qualname__}"


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
@torch.no_grad()
def test_one_that_breaks_the_contract_is_found(broken: type[All2All[Any]]) -> None:
    bench = Bench(Case(place_of(broken)))
    with pytest.raises((AssertionError, ConfigError, RuntimeError, AttributeError, pytest.fail.Exception)):
        CHECKS[BROKEN[broken]](bench)


def test_what_two_ranks_show() -> None:
    run_ranks(_on_two_ranks, 2)


class LaunchesMoreInOneLane(TorchDistAll2All):
    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        if dbo_enabled() and dbo_current_ubatch_id() == 1:
            launch_all_gather(y[:0], self.group, sizes=[0, 0], name="more").wait()
        return super().combine(y, handle)


class HasMorePeersThanItSays(WithOtherTraits, TorchDistAll2All):
    others = {"other_ranks": 0}  # noqa: RUF012


class SendsEverythingEverywhere(WithOtherTraits, AllGatherReduceScatterAll2All):
    others = {"routed": True}  # noqa: RUF012


class SendsWithEveryChunk(WithOtherTraits, AllGatherReduceScatterAll2All):
    others = {"once": True}  # noqa: RUF012


ON_TWO_RANKS = {
    LaunchesMoreInOneLane: "lanes",
    HasMorePeersThanItSays: "traits",
    SendsEverythingEverywhere: "bytes_sent",
    SendsWithEveryChunk: "bytes_of_chunks",
}


def _on_two_ranks(rank: int, ranks: int) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.no_grad():
        for broken, check in ON_TWO_RANKS.items():
            with pytest.raises(AssertionError):
                CHECKS[check](Bench(Case(place_of(broken)), rank, group))


# --------------------------------------------------------------------------------------------- one file is a back end


@pytest.mark.long
def test_one_file_adds_a_back_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place, or by a name, through all that a server checks; and the suite takes it."""
    (tmp_path / "my_transport.py").write_text(
        textwrap.dedent(
            """
            from moe.all2all.local import LocalAll2All

            class Mine(LocalAll2All):
                def __init__(self, *, group=None, num_experts, speed: int = 1):
                    super().__init__(group=group, num_experts=num_experts)
                    self.speed = speed

                @staticmethod
                def check_options(options, num_ranks):
                    pass

                @staticmethod
                def default_options(sizes, num_ranks):
                    return {"speed": sizes.decode}
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    register_all2all_backend("mine", "my_transport:Mine")
    for name in ("my_transport:Mine", "mine"):
        ranks = ["--data-parallel-size", "2", "--enable-expert-parallel"]
        words = [str(TINY_MOE), *ranks, "--all2all-backend", name, "--all2all-options"]
        settings = resolve_settings(*read_layers(SERVE, "ubatch serve", "", [*words, "speed=3"])[0], gpus=0)
        options = to_engine_options(settings)
        assert (options.all2all_backend, options.all2all_options) == (name, {"speed": 3})
        with pytest.raises(ConfigError, match="has no option 'spede'; did you mean 'speed'"):
            resolve_settings(*read_layers(SERVE, "ubatch serve", "", [*words, "spede=3"])[0], gpus=0)
        made: Any = make_transport(name, None, None, 8, sizes=StepSizes(5))
        assert (type(made).__name__, made.speed) == ("Mine", 5)
    with torch.no_grad():
        for check in CHECKS.values():
            check(Bench(Case("mine")))


class OfItsOwn:
    """A transport as up to 0.1.0: it does not inherit from `All2All`."""

    def __init__(self, *, group: CommGroup | None = None, num_experts: int) -> None:
        self.inner = LocalAll2All(group=group, num_experts=num_experts)
        self.traits, self.num_experts, self.experts = self.inner.traits, num_experts, self.inner.experts

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        return self.inner.dispatch(x, topk_ids, topk_weights)

    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        return self.inner.combine(y, handle)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_transport_that_does_not_inherit_works_for_one_more_release(by_name: bool) -> None:
    inheriting.cache_clear()
    experts = make_experts("reference", torch.randn(4, 2 * 6, 8), torch.randn(4, 8, 6))
    x, ids, share = torch.randn(5, 8), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    given: Any = None if by_name else OfItsOwn(num_experts=4)
    with pytest.warns(DeprecationWarning, match="OfItsOwn is a transport that does not inherit"):
        layer = FusedMoEModularKernel(given or make_all2all(f"{__name__}:OfItsOwn", group=None, num_experts=4), experts)
    mine = layer.all2all
    assert isinstance(mine, All2All)
    assert given in (None, mine)
    with torch.no_grad():
        expected = FusedMoEModularKernel(LocalAll2All(num_experts=4), experts)(x, share, ids)
        assert torch.equal(layer(x, share, ids), expected)
        assert len(mine.dispatch_chunks(x, ids, share, [range(2), range(2, 4)])) == 2
    with pytest.raises(ConfigError, match=r"int is no subclass of moe\.All2All"):
        FusedMoEModularKernel(5, experts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_such_module:Mine", "no_such_module cannot be imported"),
        ("torch:Mine", "module 'torch' has no attribute 'Mine'"),
        ("torch.nn:Linear", "is no subclass of moe.All2All"),
        (":", "must be of the form 'package.module:attribute'"),
    ],
)
def test_a_place_that_leads_nowhere_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_all2all(name, group=None, num_experts=8)


def test_names_of_abilities_lead_to_the_one_class() -> None:
    for name in ("MarksInputs", "SendsBlocks", "ServesChunks", "SignalsCombine", "TellsLater"):
        with pytest.warns(DeprecationWarning, match=rf"moe\.{name} is gone in the next release"):
            assert getattr(moe, name) is All2All
    with pytest.raises(AttributeError, match="'moe' has no attribute 'nonsense'"):
        moe.nonsense  # noqa: B018
