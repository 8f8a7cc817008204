"""Cases that a proof must detect: groups of rows, masks, state, random numbers, near-ties, changes after the proof."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from wrapping import FIRST, Plain, made, outcome, proved, rows, seen, wrapped

from ubatch import DeclineReason, dbo_enabled

pytestmark = pytest.mark.long


def test_groups_of_neighbouring_rows_are_not_cut_unseen() -> None:
    def centred(x: Tensor, size: int) -> Tensor:
        group = torch.arange(len(x)) // size
        total = torch.zeros(int(group.max()) + 1, x.shape[1]).index_add(0, group, x)
        return x - total[group]

    for size in (2, 3):
        for count in range(2, 25):
            engaged, _, _ = outcome(lambda x, size=size: centred(x, size), *[(torch.randn(count, 5),)] * 3)
            assert not engaged, (size, count)


def test_what_is_masked_does_not_hide_the_rest() -> None:
    keep = torch.ones(8, 6, dtype=torch.bool)
    keep[:, 3] = False
    for fill in (-1e9, torch.finfo(torch.float32).min, 1e4):
        for dtype in (torch.float32, torch.bfloat16):
            fitting = max(fill, torch.finfo(dtype).min)
            for dim in (0, 1):
                masked = lambda x, keep, dim=dim, fill=fitting: x.softmax(dim).masked_fill(~keep, fill)  # noqa: E731
                engaged, _, _ = outcome(masked, *[(torch.randn(8, 6).to(dtype), keep)] * 4)
                assert (engaged > 0) == (dim == 1)


def test_keywords_may_come_in_any_order() -> None:
    module = Plain(lambda a, b: a @ b.T)
    with wrapped(module, **FIRST) as wrapper:
        for first, second in ((8, 3), (8, 3), (4, 8)):
            a, b = torch.randn(first, 5), torch.randn(second, 5)
            torch.testing.assert_close(wrapper(b=b, a=a), a @ b.T)
            torch.testing.assert_close(wrapper(a=a, b=b), a @ b.T)


def test_another_function_is_another_call() -> None:
    functions = [lambda t: t.relu(), lambda t: t.softmax(0)]
    x = torch.randn(8, 5)
    outcome(lambda x, fn: fn(x), *[(x, function) for function in functions for _ in range(3)])


def test_an_output_list_may_have_another_length() -> None:
    with torch.inference_mode():
        calls = [(torch.randn(8, length, 3),) for length in (4, 4, 5, 6, 4)]
        assert outcome(lambda x: [part * 2 for part in x.unbind(1)], *calls) == (4, 1, {})


def test_lanes_that_disagree_for_once_run_whole_in_inference_mode() -> None:
    ones = torch.ones(8, 4)
    mixed = torch.cat([ones[:4], -ones[:4]])
    with torch.inference_mode():
        engaged, proved, declined = outcome(lambda x: (x * 2, bool((x > 0).any())), (ones,), (ones,), (mixed,))
    assert (engaged, proved, declined) == (1, 1, {DeclineReason.CANNOT_MERGE: 1})


def test_a_lane_that_raises_after_the_proof_runs_whole() -> None:
    def even(x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("four")
        return x * 2

    assert outcome(even, (rows(16),), (rows(16),), (rows(8),)) == (1, 1, {DeclineReason.LANE_FAILED: 1})


def test_modules_whose_weights_come_with_the_first_call() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(4):
            x = torch.randn(8, 4)
            torch.testing.assert_close(wrapper(x), module(x))
        assert wrapper.statistics().engaged >= 1


def test_training_through_what_writes_to_its_argument() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            wrapper(torch.randn(8, 4)).pow(2).sum().backward()
        assert seen(wrapper) == (0, 0, {DeclineReason.GRADIENTS: 3})


@dataclass
class Doubling:
    """Is another one when it is made anew."""

    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


class Tagged(list):  # type: ignore[type-arg]
    """A list with an attribute."""


def test_outputs_that_cannot_be_made_anew() -> None:
    x = torch.randn(8, 4)
    with wrapped(Plain(Doubling), **FIRST) as wrapper:
        for _ in range(3):
            assert torch.equal(wrapper(x).x, x * 2)

    def tagged(x: Tensor) -> Tagged:
        made = Tagged([x * 2, x])
        made.tag = "t"
        return made

    with wrapped(Plain(tagged), **FIRST) as wrapper:
        for _ in range(3):
            assert wrapper(x).tag == "t"


def test_arguments_that_overlap_are_written_to_whole() -> None:
    def forward(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    with proved(Plain(lambda pair: forward(*pair)), lambda: (rows(16), rows(16))) as wrapper:
        one, other = rows(17), rows(17)
        assert torch.equal(wrapper((one[:-1], one[1:])), forward(other[:-1], other[1:]))


def test_what_changes_the_modules_structure_is_proved_anew() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with proved(module, lambda: x) as wrapper:
        wrapper.add_module("1", nn.Softmax(0))
        torch.testing.assert_close(wrapper(x), module(x))


# --------------------------------------------------------------------------------------------- state and random numbers


def static(self: Any, x: Tensor) -> Tensor:
    """Writes its output into a buffer of its own."""
    out = self.out[: len(x)]
    return torch.mul(x, 2, out=out) if not out.requires_grad else out


def keys(self: Any, x: Tensor) -> Tensor:
    """Keeps keys between calls, in a plain object."""
    self.cache.keys = torch.cat([self.cache.keys, x])
    return x + self.cache.keys.sum()


def normed(self: Any, x: Tensor) -> Tensor:
    """Running statistics that no version counter sees."""
    return nn.functional.batch_norm(x, self.mean, self.var, training=True)


def written(self: Any, x: Tensor) -> Tensor:
    """Writes to a buffer behind autograd's back."""
    self.count.data += 1
    return x * 2


def trained(self: Any, x: Tensor) -> Tensor:
    """Changes a weight as it goes."""
    with torch.no_grad():
        self.weight.mul_(1.5)
    return x * self.weight


def trained_unseen(self: Any, x: Tensor) -> Tensor:
    """Changes a weight where autograd does not look."""
    self.weight.data.mul_(0.9)
    return x * self.weight


def replaced(self: Any, x: Tensor) -> Tensor:
    self.weight = nn.Parameter(self.weight.detach() * 0.9)
    return x * self.weight


def held(self: Any, x: Tensor) -> Tensor:
    """Keeps a number in an object of its own."""
    self.own.calls += 1
    return x * (1 + self.own.calls)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


KEEPING = [
    made(static, out=lambda: torch.zeros(64, 3)),
    made(keys, cache=lambda: SimpleNamespace(keys=torch.zeros(0, 3))),
    made(normed, mean=lambda: torch.zeros(3), var=lambda: torch.ones(3)),
    made(written, count=lambda: torch.zeros(2)),
    made(trained, weight=weight),
    made(trained_unseen, weight=weight),
    made(replaced, weight=weight),
    made(held, own=lambda: SimpleNamespace(calls=0)),
]


@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_module_that_keeps_state_runs_whole_and_once(make: Callable[[], nn.Module], mode: Any) -> None:
    if mode is torch.enable_grad and make in KEEPING[:4]:
        mode = torch.no_grad  # what they write to records no gradients
    with mode():
        calls = [(rows(8) + number,) for number in range(4)]
        assert outcome(make(), *calls) == (0, 0, {DeclineReason.MODULE_KEEPS_STATE: 4})


def test_what_is_made_ready_once_is_no_state() -> None:
    def lazy(self: Any, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(3.0)
        return x + self.table

    calls = [(rows(8),)] * 3
    assert outcome(made(lazy, table=lambda: None)(), *calls) == (1, 1, {DeclineReason.MODULE_KEEPS_STATE: 1})


def test_random_numbers_are_drawn_as_often_as_by_the_module() -> None:
    module = Plain(lambda x: x + torch.rand(1))
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            torch.manual_seed(3)
            result, after = wrapper(rows(8)), torch.rand(1)
            torch.manual_seed(3)
            assert torch.equal(result, rows(8) + torch.rand(1))
            assert torch.equal(after, torch.rand(1))
        assert (len(module.calls), seen(wrapper)) == (3, (0, 0, {DeclineReason.DRAWS_RANDOM: 3}))

    def only_in_lanes(x: Tensor) -> Tensor:
        return x + 0 * torch.rand(1) if dbo_enabled() else x * 1

    with wrapped(Plain(only_in_lanes), **FIRST) as wrapper:
        torch.manual_seed(3)
        wrapper(rows(8))
        after = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(1)), "what the proof draws, it gives back"


# --------------------------------------------------------------------------------------------------------- sixteen bits


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_experts": 16, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.wide
def test_near_ties_retire_nothing() -> None:
    """Proofs of a model in bfloat16, each of other tokens, and each of a wrapper that knows nothing."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = Qwen3MoeConfig(**SMALL, **heads, vocab_size=1000, intermediate_size=64, num_experts_per_tok=4)
    model = Qwen3MoeForCausalLM(config).eval().bfloat16()
    for number in range(10):
        rows, length = 2 + number % 11, 1 + number * 7 % 40
        with torch.inference_mode(), wrapped(model, **FIRST) as wrapper:
            for _ in range(2):
                wrapper(torch.randint(1000, (rows, length)), use_cache=False)
            assert wrapper.statistics().proved == 2, wrapper.statistics().last_reason


def test_a_coupling_beside_the_cut_is_found() -> None:
    """One row in a thousand is off, and only next to the cut: few enough to be near-ties."""

    calls = [(torch.randn(1024, 8).bfloat16(),)] * 4
    engaged, _, declined = outcome(lambda x: x + torch.cat([x[:1] * 0, x[:-1]]), *calls)
    assert engaged == 0
    assert declined[DeclineReason.ROWS_DEPEND] >= 2
