"""The proof: what it detects, what it leaves unchanged, and what it costs."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapper_cases import Model, x_of
from wrapping import FIRST, Plain, assert_same, outcome, proved, rows, seen, wrapped

import ubatch
from ubatch import DeclineReason, ForwardMode, UBatchConfig, Verify, dbo_enabled, tracing
from ubatch.wrapping.proof_table import signature_of

pytestmark = pytest.mark.long


# ---------------------------------------------------------------------------------------------------- what is proved


def test_the_first_call_runs_whole_and_is_proved() -> None:
    module = Plain(lambda x: x * 2)
    with wrapped(module, **FIRST) as wrapper:
        x = rows(8)
        with tracing() as trace:
            assert torch.equal(wrapper(x), x * 2)
        assert trace.order == [], "the caller's trace shows the caller's call"
        assert module.calls[0][0][0] is x, "on the real arguments"
        sizes = [len(args[0]) for args, _ in module.calls[1:]]
        assert sorted(sizes) not in ([4, 4], []), "two lanes of unequal size"
        assert all(
            args[0].untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for args, _ in module.calls[1:]
        )
        assert seen(wrapper) == (0, 1, {})
        assert wrapper.statistics().proof_seconds > 0
        with tracing() as trace:
            assert torch.equal(wrapper(x), x * 2)
        assert {lane for lane, _ in trace.order} == {0, 1}
        wrapper(rows(200))
        assert seen(wrapper) == (2, 1, {}), "sizes do not matter"


def test_a_signature_is_what_a_call_looks_like_but_for_its_sizes() -> None:
    module = Plain(lambda x, scale=1, flag=False, name="a", extra=None: x * scale)
    with wrapped(module, **FIRST) as wrapper:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((rows(8),), {}),
            ((rows(8).double(),), {}),
            ((rows(8, 2, 2),), {}),
            ((rows(8),), {"scale": 2}),
            ((rows(8),), {"scale": 2.0}),
            ((rows(8),), {"flag": True}),
            ((rows(8),), {"name": "b"}),
            ((rows(8),), {"extra": {"y": rows(8)}}),
            ((rows(8).requires_grad_(),), {}),
            ((rows(2),), {}),  # lanes of one row
        ]
        for number, (args, kwargs) in enumerate(calls, 1):
            for _ in range(2):
                wrapper(*args, **kwargs)
            assert seen(wrapper) == (number, number, {})
        with torch.no_grad():
            wrapper(rows(8))
        assert wrapper.statistics().proved == len(calls) + 1
        wrapper.eval()(rows(8))
        assert wrapper.statistics().proved == len(calls) + 2


def test_a_look_up_is_cheap() -> None:
    module = Plain(lambda **given: given["input_ids"])
    with wrapped(module, **FIRST) as wrapper:
        eligibility = wrapper._ubatch_wrapped.eligibility
        ids = torch.zeros(8, 4, dtype=torch.long)
        call = {"input_ids": ids, "attention_mask": ids, "position_ids": ids, "use_cache": True, "labels": None}
        for _ in range(2):
            wrapper(**call)
        took = []
        for _ in range(300):
            begun = time.perf_counter()
            plan = eligibility.plan((), call, tried=True)
            eligibility.proofs.find(signature_of(plan, ForwardMode.PREFILL, 2, training=True, trains=False))
            took.append(time.perf_counter() - begun)
        assert min(took) < 40e-6


@pytest.mark.sample(3)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
def test_nothing_matches_by_chance(count: int, columns: int) -> None:
    """Lanes differ from each other and from every other size, also where rows must be repeated for it."""

    def mixed(x: Tensor) -> dict[str, Any]:
        return {
            "rows": x * 2,
            "columns": torch.ones(columns),
            "one": torch.ones(1, columns, columns),
            "turned": x.T,
            "layers": torch.stack([x, x]),
            "flat": x.flatten(),
            "items": list(x),
            "pair": (x[:, 0], "same"),
        }

    module = Plain(mixed)
    x = torch.randn(count, columns)
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            result, expected = wrapper(x), mixed(x)
            assert_same(result, expected)
        proved = (0, 0, {DeclineReason.BELOW_PREFILL_THRESHOLD: 3}) if count == 1 else (2, 1, {})
        assert seen(wrapper) == proved
        sizes = [len(args[0]) for args, _ in module.calls[1:3]] if count > 1 else []
        assert len(set(sizes)) == len(sizes)
        if count > 3:
            assert not set(sizes) & {columns}


# ------------------------------------------------------------------------------------------------------ what is found


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(0),
        lambda x: x.cumsum(0),
        lambda x: x - x.mean(0),
        lambda x: x.roll(1, 0),
        lambda x: x.sort(0).values,
        lambda x: x.flip(0),
        lambda x: x @ x.T,
        lambda x: torch.softmax(x @ x.T / 8, -1) @ x,
        lambda x: x * len(x),
        lambda x: (x, x.max()),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    ],
    ids=["softmax", "cumsum", "mean", "roll", "sort", "flip", "gram", "attention", "count", "maximum", "sdpa"],
)
@pytest.mark.parametrize("count", [2, 16, 500])
def test_rows_that_depend_on_each_other(function: Callable[[Tensor], Any], dtype: torch.dtype, count: int) -> None:
    x = torch.randn(count, 24).to(dtype)
    engaged, _, declined = outcome(function, *[(x,)] * 5)
    assert engaged == 0
    assert set(declined) <= {DeclineReason.ROWS_DEPEND, DeclineReason.CANNOT_MERGE, DeclineReason.ZERO_DIM_OUTPUT}


def test_it_says_where_and_by_how_much() -> None:
    def forward(x: Tensor) -> dict[str, Any]:
        return {"fine": x, "heads": [x * 2, x - x.mean(0)]}

    with wrapped(Plain(forward), **FIRST) as wrapper:
        wrapper(torch.randn(9, 3))
        why = str(wrapper.statistics().last_reason)
    assert why.startswith("rows_depend: output.heads.1 differs by up to ")
    assert "split_dims" in why


def test_unequal_values_are_final_after_two_calls_and_a_chance_is_forgiven() -> None:
    spoiled = [True]

    def forward(x: Tensor) -> Tensor:
        return x * 2 + (spoiled[0] and dbo_enabled())

    with wrapped(Plain(forward), **FIRST) as wrapper:
        wrapper(rows(8))
        spoiled[0] = False
        wrapper(rows(8))
        wrapper(rows(8))
        assert seen(wrapper) == (1, 1, {DeclineReason.ROWS_DEPEND: 1})
    spoiled[0] = True
    module = Plain(forward)
    with wrapped(module, **FIRST) as wrapper:
        for runs in (3, 3, 1, 1):
            module.calls.clear()
            wrapper(rows(8))
            assert len(module.calls) == runs
        assert seen(wrapper) == (0, 0, {DeclineReason.ROWS_DEPEND: 4})


# --------------------------------------------------------------------------------------------- arguments and identity


def test_arguments_that_are_written_to_are_written_once() -> None:
    def forward(x: Tensor, total: Tensor) -> Tensor:
        x.add_(1)
        total.add_(x.sum(0))
        return x * 2

    assert outcome(forward, *[(rows(16), torch.zeros(3))] * 3) == (2, 1, {})


def test_an_argument_that_comes_back_is_the_callers_own() -> None:
    with wrapped(Plain(lambda x, y: {"in place": x.mul_(2), "y": y, "sum": x + y}), **FIRST) as wrapper:
        for _ in range(3):
            x, y = rows(8), rows(8)
            result = wrapper(x, y)
            assert result["in place"] is x
            assert result["y"] is y
            assert torch.equal(result["sum"], rows(8) * 3)
        assert seen(wrapper) == (2, 1, {})


def test_an_output_unlike_the_proved_one_runs_whole_or_is_refused() -> None:
    odd = [False]

    def forward(x: Tensor) -> Any:
        return (x, x) if odd[0] and dbo_enabled() else x * 2

    def writing(x: Tensor) -> Any:
        return forward(x.add_(1))

    with wrapped(Plain(forward), **FIRST) as wrapper:
        wrapper(rows(8))
        odd[0] = True
        for calls in (1, 2):
            assert torch.equal(wrapper(rows(8)), rows(8) * 2)
            assert seen(wrapper) == (0, 1, {DeclineReason.CANNOT_MERGE: calls})
    for count, fits in ((8, True), (6000, False)):  # a small argument is copied before lanes may write to it
        odd[0] = False
        with wrapped(Plain(writing), **FIRST) as wrapper:
            wrapper(rows(count))
            odd[0] = True
            x = rows(count)
            if fits:
                assert torch.equal(wrapper(x), (rows(count) + 1) * 2)
                assert torch.equal(x, rows(count) + 1)
            else:
                with pytest.raises(
                    ubatch.SideEffectError, match=r"unlike in the call that was proved.*'x', which cannot be put"
                ):
                    wrapper(x)
            odd[0] = False
            wrapper(rows(count))
            assert seen(wrapper) == (0, 1, {DeclineReason.CANNOT_MERGE: 2 if fits else 1})


# ------------------------------------------------------------------------------------------------------------ settings


def test_verify_always_and_off() -> None:
    module = Plain(lambda x: x * 2)
    with wrapped(module, verify="always") as wrapper:
        for _ in range(3):
            wrapper(rows(8))
        assert seen(wrapper) == (0, 3, {})
    with wrapped(module, verify="off") as wrapper:
        wrapper(rows(8))
        assert seen(wrapper) == (1, 0, {})
    assert UBatchConfig.from_mapping({"verify": "always"}).verify == Verify.ALWAYS
    assert UBatchConfig.from_mapping({"verify": False}).verify == Verify.OFF, "as YAML reads off"
    assert UBatchConfig.from_mapping({"verify": {"token-threshold": 9}}).verify == Verify.FIRST
    with pytest.raises(ubatch.ConfigError, match=r"unknown verify 'fist'; did you mean 'first'\?"):
        UBatchConfig(verify="fist")


def test_overlap_that_is_required_may_be_proved_first() -> None:
    with proved(Plain(lambda x: x * 2), require_overlap=True):
        pass
    depends = Plain(lambda x: x.cumsum(0))
    with (
        wrapped(depends, require_overlap=True, **FIRST) as wrapper,
        pytest.raises(ubatch.OverlapDeclined, match="rows_depend"),
    ):
        wrapper(rows(8))


def test_what_changes_the_module_is_proved_anew() -> None:
    module = Model()
    with proved(module, x_of) as wrapper:
        wrapper.factor = 0.5
        torch.testing.assert_close(wrapper(x := x_of()), module(x))
        wrapper(x_of())
        assert seen(wrapper) == (2, 2, {})


def test_a_proof_that_does_not_fit_in_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr("ubatch.calls.call_plan.Leaf.copied", refuse)
    assert outcome(lambda x: x * 2, *[(rows(8),)] * 3) == (0, 0, {DeclineReason.CANNOT_PROVE: 3})


def test_an_error_of_the_module_is_the_callers_while_proving() -> None:
    error = ValueError("odd")
    broken = [True]

    def forward(x: Tensor) -> Tensor:
        if broken[0]:
            raise error
        return x * 2

    with wrapped(Plain(forward), **FIRST) as wrapper:
        with pytest.raises(ValueError, match="odd") as caught:
            wrapper(rows(8))
        assert caught.value is error
        broken[0] = False
        for _ in range(2):
            wrapper(rows(8))
        assert seen(wrapper) == (1, 1, {})


def test_sixteen_bits_are_proved_twice_with_different_cuts() -> None:
    module = Plain(nn.Linear(8, 8).bfloat16().forward)
    with wrapped(module, **FIRST) as wrapper, torch.no_grad():
        x = torch.randn(32, 8).bfloat16()
        cuts = []
        for _ in range(2):
            module.calls.clear()
            wrapper(x)
            cuts.append(sorted(len(args[0]) for args, _ in module.calls[1:]))
        assert cuts[0] != cuts[1] or module.calls[1][0][0].shape != module.calls[2][0][0].shape
        assert seen(wrapper) == (0, 2, {})
        wrapper(x)
        assert seen(wrapper) == (1, 2, {})


def test_gradients_flow_through_a_proving_call() -> None:
    module = Model()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            x, given = x_of(8), [*module.parameters()]
            ours, plain = (torch.autograd.grad(call(x).square().sum(), given) for call in (wrapper, module))
            torch.testing.assert_close(ours, plain)
        assert seen(wrapper) == (2, 1, {})
