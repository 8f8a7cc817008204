"""The wrapper's public behaviour: it overlaps in the predicted order or behaves as the module; misuse is refused."""

import copy
import dataclasses
import io
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from lanes import lane_threads, no_lane_threads_within
from torch import Tensor, nn
from wrapper_cases import LAYER, LAYERS, Model, identity, x_of
from wrapping import FIRST, Plain, only_rank, seen, through_pickle, wrapped

import ubatch
from ubatch import SCHEDULES, ConfigError, DeclineReason, NestedUBatchError, Point, UBatchWrapper, interleave, tracing


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def wrapper(model: Model) -> Iterator[UBatchWrapper]:
    with wrapped(model) as made:
        yield made


# ------------------------------------------------------------------------------------------------ overlapped and right


def test_every_split_is_a_line_for_the_log(wrapper: UBatchWrapper, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ubatch"):
        wrapper(x_of(7))
        wrapper(x_of(1))
    (line,) = [each.getMessage() for each in caplog.records if each.name == "ubatch.wrapping.statistics"]
    assert line.startswith("split: 3 + 4 tokens, run by schedule mlp_shared_overlap: 2 lanes x 1 chunks")


@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if not schedule.single_batch])
def test_every_schedule_gives_the_modules_outputs_in_the_order_foretold(model: Model, name: str, lanes: int) -> None:
    schedule = SCHEDULES[name]
    with wrapped(model, schedule=name, num_ubatches=lanes) as wrapper:
        for rows in (lanes, 7, 7):
            x = x_of(rows)
            with tracing() as trace:
                torch.testing.assert_close(wrapper(x), model(x))
            program = [str(point) for point in LAYER if schedule.active(point)] * LAYERS
            one_lane = schedule.lanes == 1
            assert trace.order == ([] if one_lane else interleave([program] * lanes, lead=schedule.lead))
        seen = wrapper.statistics()
    assert (seen.calls, seen.engaged) == (3, 0 if one_lane else 3)
    assert dict(seen.declined) == ({DeclineReason.SERIAL_SCHEDULE: 3} if one_lane else {})
    assert seen.lane_threads_started == (0 if one_lane else lanes)


def test_a_schedule_of_ones_own(model: Model) -> None:
    schedule = ubatch.Schedule("mine", lead=1, points_off=frozenset(Point) - {Point.SELECT})
    with wrapped(model, schedule=schedule, num_ubatches=3) as wrapper, tracing() as trace:
        wrapper(x_of())
    assert trace.order == interleave([["select", "my own"] * LAYERS] * 3, lead=1)


def test_statistics_are_a_frozen_snapshot(wrapper: UBatchWrapper) -> None:
    before = wrapper.statistics()
    assert before == ubatch.UBatchStatistics(0, 0, {}, 0, 0, None)
    with tracing() as trace:
        wrapper(x_of())
    switches = sum(one[0] != other[0] for one, other in zip(trace.order, trace.order[1:], strict=False))
    wrapper(x_of(1))
    after = wrapper.statistics()
    why = "below_prefill_threshold: 1 tokens are below the prefill threshold of 2."
    declined = {DeclineReason.BELOW_PREFILL_THRESHOLD: 1}
    assert (before.calls, after) == (0, ubatch.UBatchStatistics(2, 1, declined, switches, 2, why))
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.calls = 3  # type: ignore[misc]


def test_close_and_use_again(wrapper: UBatchWrapper) -> None:
    x = x_of()
    expected = wrapper(x)
    assert len(lane_threads()) == 2
    wrapper.close()
    wrapper.close()
    assert no_lane_threads_within(5)
    assert torch.equal(wrapper(x), expected)
    assert wrapper.statistics().lane_threads_started == 4


# ------------------------------------------------------------------------------------------------------------- misuse


def test_nested_use_is_refused(model: Model, wrapper: UBatchWrapper) -> None:
    with pytest.raises(NestedUBatchError, match="is a UBatchWrapper already"):
        UBatchWrapper(wrapper)
    for outer in (nn.Sequential(nn.Linear(4, 4), wrapper), nn.Sequential(nn.ModuleDict({"a": wrapper}))):
        with pytest.raises(NestedUBatchError, match=r"\.(1|a) is a UBatchWrapper already. Wrap only the outermost"):
            UBatchWrapper(outer)
    hidden = [wrapper]
    with wrapped(Plain(lambda x: hidden[0](x))) as outer:
        with pytest.raises(NestedUBatchError, match="called inside lane 0"):
            outer(x_of())
        hidden[0] = model
        outer(x_of())
        assert outer.statistics().engaged == 1


def test_a_call_from_inside_its_own_call_is_the_bare_one() -> None:
    """In lanes, and in a call that runs whole."""

    def halving(x: Tensor, depth: int) -> Tensor:
        return hidden[0](x / 2, depth - 1) if depth else x * 1

    hidden: list[Any] = [None]
    with wrapped(Plain(halving)) as wrapper:
        hidden[0] = wrapper
        for x in (x_of(1), x_of()):
            assert torch.equal(wrapper(x, 3), x / 8)
        statistics = wrapper.statistics()
        assert statistics.engaged == 1
        assert statistics.declined[DeclineReason.CONCURRENT_CALL] == 3 * 3, "in the whole call and in both lanes"
        assert statistics.calls == 2 + statistics.declined[DeclineReason.CONCURRENT_CALL]


class Slow:
    """Doubles, and waits inside until it may leave."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()

    def __call__(self, x: Tensor) -> Tensor:
        self.inside.set()
        assert self.leave.wait(20)
        return x * 2


def test_calls_of_several_threads_run_whole_beside_each_other() -> None:
    slow, x, y = Slow(), x_of(), x_of()
    with wrapped(Plain(slow)) as wrapper, ThreadPoolExecutor(1) as other:
        result = other.submit(wrapper, x)
        assert slow.inside.wait(20)
        threading.Timer(0.1, slow.leave.set).start()
        assert torch.equal(wrapper(y), y * 2)
        assert torch.equal(result.result(20), x * 2)
        assert (wrapper.statistics().calls, seen(wrapper)) == (2, (1, 0, {DeclineReason.CONCURRENT_CALL: 1}))


def test_many_threads_lose_no_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with wrapped(model, **FIRST) as wrapper:

        @torch.inference_mode()
        def caller(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(50):
                x = torch.randn(8, 4, generator=generator)
                torch.testing.assert_close(wrapper(x), model(x))

        with ThreadPoolExecutor(4) as callers:
            assert [*callers.map(caller, range(4), timeout=60)] == [None] * 4
        statistics = wrapper.statistics()
        assert statistics.calls == 200
        assert statistics.engaged + statistics.proved + sum(statistics.declined.values()) == 200


def test_concurrent_calls_of_ranks_are_refused() -> None:
    """The ranks take a step together, so a call that only one of them makes cannot join in."""
    slow = Slow()
    with only_rank() as group, wrapped(Plain(slow), group=group) as wrapper, ThreadPoolExecutor(1) as other:
        result = other.submit(wrapper, x_of(1))
        assert slow.inside.wait(20)
        with pytest.raises(ubatch.ConcurrentCallError, match="another thread"):
            wrapper(x_of())
        slow.leave.set()
        result.result(20)
        assert wrapper(x_of()).shape == (6, 4), "usable again"
        assert wrapper.statistics().calls == 2, "the refused call is none"


def test_what_is_no_module_mode_or_device_is_refused(model: Model) -> None:
    for settings, message in (
        (
            {"cudagraph_mode": ubatch.CUDAGraphMode.FULL},
            r"CUDA graphs need a CUDA device, not 'cpu'\. Move the module there",
        ),
        ({"cudagraph_mode": "ful"}, r"unknown cudagraph_mode 'ful'; did you mean 'full'\?"),
        ({"model": identity}, r"wraps an nn\.Module, not a function"),
        ({"device": "gpu"}, "'gpu' is no torch device"),
    ):
        with pytest.raises(ConfigError, match=message):
            UBatchWrapper(**{"model": model, **settings})
    if not torch.cuda.is_available():
        with pytest.raises(ubatch.UBatchError):
            UBatchWrapper(model, device="cuda")
    UBatchWrapper(model, cudagraph_mode="none", device="cpu")(x_of(1))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------- it is the module itself


def test_state_parameters_and_modes_are_the_modules(model: Model, wrapper: UBatchWrapper) -> None:
    assert list(wrapper.state_dict()) == list(model.state_dict()) == ["scale", *dict(model.named_parameters())]
    assert all(one is other for one, other in zip(wrapper.parameters(), model.parameters(), strict=True))
    other = Model()
    assert str(wrapper.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model.layers[0].weight, other.layers[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapper.load_state_dict({})
    assert wrapper.eval() is wrapper
    assert (wrapper.training, model.layers[0].training) == (False, False)
    assert wrapper.train() is wrapper
    assert model.training
    assert wrapper.to(torch.float64) is wrapper
    assert wrapper(x_of().double()).dtype == model.scale.dtype == torch.float64
    assert wrapper.requires_grad_(False) is wrapper
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert wrapper.get_submodule("layers.1") is model.layers[1]
    assert [name for name, _ in wrapper.named_modules()] == [name for name, _ in model.named_modules()]


def test_attributes_are_the_modules(model: Model, wrapper: UBatchWrapper) -> None:
    assert (wrapper.factor, wrapper.width, wrapper.module) == (1.0, 4, model)
    wrapper.factor = 0.0
    wrapper.note = "new"
    wrapper.head = nn.Linear(4, 2)
    assert (model.factor, model.note, "head" in model._modules) == (0.0, "new", True)
    x = x_of()
    assert torch.equal(wrapper(x), x)
    del wrapper.note, wrapper.head
    assert not hasattr(model, "note")
    assert not hasattr(model, "head")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'absent'"):
        wrapper.absent  # noqa: B018
    assert {"factor", "width", "twice", "statistics", "layers", "state_dict"} <= set(dir(wrapper))
    assert repr(wrapper) == f"UBatchWrapper({model!r})"
    assert wrapper.config is wrapper.ubatch_config, "unless the module has a config of its own"
    model.config = "the module's"
    assert wrapper.config == "the module's"


def test_hooks_of_the_module_run_once_per_lane(model: Model, wrapper: UBatchWrapper) -> None:
    seen: list[int] = []
    handle = wrapper.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    before = model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    x = x_of(5)
    torch.testing.assert_close(wrapper(x), model(x))
    assert seen == [2, 3, 5]
    wrapper.twice(x)
    assert seen[3:] == [2, 3, 2, 3], "not once more for the method's own call"
    seen.clear()
    handle.remove()
    before.remove()
    wrapper(x)
    assert not seen


def test_a_wrapper_inside_another_module(wrapper: UBatchWrapper) -> None:
    outer = nn.Sequential(nn.Linear(4, 4), wrapper)
    plain = nn.Sequential(outer[0], wrapper.module)
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    outer.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    outer.double().eval().apply(lambda module: setattr(module, "seen", True))
    assert not wrapper.training
    assert wrapper.module.seen
    x = x_of().double()
    torch.testing.assert_close(outer(x), plain(x))
    assert wrapper.statistics().engaged == 1
    assert "UBatchWrapper(Model(" in repr(outer)
    outer(x).sum().backward()
    assert wrapper.module.layers[0].weight.grad is not None
    outer.zero_grad()
    assert wrapper.module.layers[0].weight.grad is None


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("nested", [False, True])
def test_copies_are_wrappers_of_copies(wrapper: UBatchWrapper, duplicate: Callable[[Any], Any], nested: bool) -> None:
    x = x_of()
    expected = wrapper(x)
    made = duplicate(nn.Sequential(wrapper) if nested else wrapper)
    other = made[0] if nested else made
    assert type(other) is UBatchWrapper
    assert (other.ubatch_config, other.statistics().calls) == (wrapper.ubatch_config, 0)
    assert torch.equal(made(x), expected)
    assert other.statistics().engaged == 1
    other.layers[0].weight.data.zero_()
    assert torch.equal(wrapper(x), expected), "nothing is shared"
    other.close()


def test_errors_can_be_pickled() -> None:
    errors: list[ubatch.UBatchError] = [
        ubatch.PeerFailed(3, "gone"),
        ubatch.OverlapDeclined("no", DeclineReason.DISABLED),
    ]
    errors += [ubatch.CannotSplit(DeclineReason.NO_SPLITTER, "what?"), ConfigError("bad")]
    errors[0].add_note("noted")
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.long
def test_hang_checks_can_be_suspended(model: Model) -> None:
    def slow(x: Tensor) -> Tensor:
        threading.Event().wait(0.3)
        return x * 1

    with wrapped(Plain(slow), timeout_s=0.1) as wrapper:
        with wrapper.no_timeout(), wrapper.no_timeout():
            assert wrapper(x_of()).shape == (6, 4)
        with pytest.raises(ubatch.UBatchTimeout, match=r"held the baton for .* \(timeout_s = 0.1\)"):
            wrapper(x_of())
        with wrapper.no_timeout():
            wrapper(x_of())
        assert wrapper.statistics().lane_threads_started == 4
