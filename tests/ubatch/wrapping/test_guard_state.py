"""State in unusual places: what a module keeps outside its plain attributes is seen, put back or named."""

import _thread
import collections
import dataclasses
import io
import itertools
import logging
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from wrapping import FIRST, Late, assert_same, made, proved, rows, seen, wrapped

from ubatch import DeclineReason, SideEffectError

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
KEEPS_STATE = DeclineReason.MODULE_KEEPS_STATE


@dataclasses.dataclass(slots=True)
class Slots:
    calls: int = 0


class Counters(nn.Module):
    """Counts its calls in an object of its own."""

    def __init__(self, holder: Any, count: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear, self.holder = nn.Linear(3, 3), holder
        self.count = lambda: count(self.holder)

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.linear(x)


def tick(holder: Any) -> None:
    holder.calls += 1


def count_in_bytes(holder: Any) -> None:
    holder[0] += 1


class Private:
    """Has nothing but a private slot."""

    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def tick(self) -> None:
        self.__calls += 1

    def calls(self) -> int:
        return self.__calls


class SlottedList(list):  # type: ignore[type-arg]
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class HashedSlots:
    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls = 0


class Word(str):
    calls = 0


class Scripted(nn.Module):
    """Counts in a way that a scripted module can."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.log = 0, [0]
        self.held = torch.zeros(())
        self.replaced = torch.zeros(())
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, way: int) -> None:
        if way == 1:
            self.count += 1
        elif way == 2:
            self.log.append(len(self.log))
        elif way == 3:
            self.held += 1
        elif way == 4:
            self.replaced = self.replaced + 1
        elif way == 5:
            self.buffer += 1


def scripted() -> nn.Module:
    return torch.jit.script(Scripted())


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(scripted(), file)
    file.seek(0)
    return torch.jit.load(file)


def count_calls(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return x * 2


def traced() -> nn.Module:
    return torch.jit.trace(made(count_calls, calls=lambda: torch.zeros(()))().eval(), rows(8))


IN_SCRIPTS: dict[int, Callable[[Any], Any]] = {
    1: lambda holder: holder.count,
    2: lambda holder: len(holder.log),
    3: lambda holder: holder.held.item(),
    4: lambda holder: holder.replaced.item(),
    5: lambda holder: holder.buffer.item(),
}


TICKING: dict[str, Callable[[], Any]] = {
    "slots": Slots,
    "slots of a list": SlottedList,
    "an attribute of a string": lambda: Word("a"),
    "a class with a name of ours": type("State", (), {"__module__": "attention.state", "calls": 0}),
}
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "set": (lambda: {-1}, lambda h: h.add(len(h)), len),
    "bytearray": (lambda: bytearray(4), count_in_bytes, bytes),
    "array": (lambda: np.zeros(4), count_in_bytes, lambda h: h.tolist()),
    "deque": (lambda: collections.deque([1], 8), lambda h: h.append(2), list),
    "count": (itertools.count, next, repr),
    "list iterator": (lambda: iter(list(range(99))), next, lambda h: h.__reduce__()[2]),
    "torch's own": (
        lambda: torch.distributions.Normal(torch.zeros(1), torch.ones(1)),
        lambda h: h.loc.add_(1),
        lambda h: h.loc.item(),
    ),
    "generator of random numbers": (
        lambda: torch.Generator().manual_seed(1),
        lambda h: torch.rand(1, generator=h),
        lambda h: h.get_state().tolist(),
    ),
    "dates": (lambda: np.zeros(2, "datetime64[s]"), lambda h: h.__setitem__(0, h[0] + 1), lambda h: str(h[0])),
    "text": (io.StringIO, lambda h: h.write("a"), io.StringIO.getvalue),
    "a private slot": (Private, lambda h: h.tick(), lambda h: h.calls()),
    "numpy's generator": (
        lambda: np.random.default_rng(1),
        lambda h: h.random(),
        lambda h: h.bit_generator.state["state"]["state"],
    ),
    "numpy's older one": (lambda: np.random.RandomState(1), lambda h: h.rand(), lambda h: h.get_state()[2]),
    "a key": (lambda: {"x": 1, HashedSlots(): 2}, lambda h: tick([*h][1]), lambda h: [*h][1].calls),
    "keys that look alike": (
        lambda: {1: torch.zeros(1), "1": torch.zeros(1)},
        lambda h: h["1"].add_(1),
        lambda h: h["1"].item(),
    ),
    "a weak container": (
        weakref.WeakKeyDictionary,
        lambda h: h.__setitem__(HashedSlots, len(h) + h.get(HashedSlots, 0) + 1),
        lambda h: h[HashedSlots],
    ),
    "a cache": (
        DynamicCache,
        lambda h: h.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0),
        lambda h: h.get_seq_length(),
    ),
    "a traced module": (traced, lambda h: h(rows(8)), lambda h: h.calls.item()),
    **{f"a scripted module, {way}": (scripted, lambda h, way=way: h(way), IN_SCRIPTS[way]) for way in IN_SCRIPTS},
    **{f"a loaded module, {way}": (loaded, lambda h, way=way: h(way), IN_SCRIPTS[way]) for way in IN_SCRIPTS},
    **{name: (make, tick, lambda h: h.calls) for name, make in TICKING.items()},
    "behind a method": (lambda: Slots().__repr__, lambda h: tick(h.__self__), lambda h: h()),
}


@pytest.mark.parametrize("what", HOLDERS)
def test_state_in_unusual_places_is_seen(what: str) -> None:
    make, count, read = HOLDERS[what]
    module, bare = Counters(make(), count), Counters(make(), count)
    bare.linear = module.linear
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            assert_same(wrapper(rows(8)), bare(rows(8)))
        assert (read(module.holder), seen(wrapper)) == (read(bare.holder), (0, 0, {KEEPS_STATE: 3}))


@pytest.mark.parametrize("what", sorted(HOLDERS.keys() - {"count"}))
def test_state_in_unusual_places_is_put_back(what: str) -> None:
    """All but an `itertools.count`, which cannot be."""
    make, count, read = HOLDERS[what]
    late: list[bool] = []
    module = Counters(make(), lambda holder: count(holder) if late else None)
    bare = Counters(make(), count)
    with proved(module) as wrapper:
        late.append(True)
        for calls in (1, 2):
            wrapper(rows(8))
            bare(rows(8))
            assert (read(module.holder), seen(wrapper)) == (read(bare.holder), (1, 1, {KEEPS_STATE: calls}))


def remember(module: Any, x: Tensor) -> Tensor:
    module.lengths.append(len(x))
    return x * 2


OF_CLASSES: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "what its class holds": (
        type("Remembering", (nn.Module,), {"lengths": [], "forward": remember}),
        lambda module: len(module.lengths),
    ),
    "its slots": (
        type("Slotted", (nn.Module,), {"__slots__": ("calls",), "forward": count_calls}),
        lambda module: module.calls,
    ),
}


@pytest.mark.parametrize("what", OF_CLASSES)
def test_what_a_modules_class_has_is_its_state(what: str) -> None:
    kind, read = OF_CLASSES[what]
    module: Any = kind()
    if what == "its slots":
        module.calls = 0
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            wrapper(rows(8))
        assert (read(module), seen(wrapper)) == (3, (0, 0, {KEEPS_STATE: 3}))


def test_a_scripted_submodule_overlaps() -> None:
    with proved(nn.Sequential(torch.jit.script(nn.Linear(3, 3)))):
        pass


def test_a_flag_that_callers_toggle_ends_in_whole_calls() -> None:
    module = Counters([], lambda holder: None)
    with wrapped(module, **FIRST) as wrapper:
        for step in range(40):
            module.flag = step % 2 == 0
            wrapper(rows(8))
        assert seen(wrapper) == (0, 16, {KEEPS_STATE: 24})
        assert "'flag' was changed between calls" in str(wrapper.statistics().last_reason)


def test_a_thread_that_has_ended_is_asked_for_nothing() -> None:
    """Python 3.11 lists threads of others for ever, once they have asked for themselves."""
    for _ in range(10):
        _thread.start_new_thread(threading.current_thread, ())
    with proved(nn.Linear(3, 3)):
        pass


def test_a_tensor_of_another_size_is_named() -> None:
    module = Late(lambda m, x: m.seen.resize_(4).zero_()).eval()
    with proved(module) as wrapper:
        module.late()[0] = True
        with pytest.raises(SideEffectError, match="'seen', which cannot be put back"):
            wrapper(rows(8))


local = threading.local()


class Reading:
    """Has a method that reads a `threading.local`."""

    def scale(self) -> float:
        return getattr(local, "scale", 1.0)


class Broken:
    """Raises wherever one looks."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("out of its context")


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Counters((index for index in range(99)), next), "'holder' is a generator"),
        (Counters(itertools.cycle("ab"), next), "'holder' is a cycle"),
        (Counters(threading.local(), lambda holder: None), "'holder' is a threading.local"),
        (Counters(Reading(), lambda holder: None), "'holder' is reading 'local', a threading.local"),
        (Counters(Broken(), lambda holder: None), "'holder' is a Broken, which cannot be read (RuntimeError"),
        (made(lambda self, x: x * getattr(local, "scale", 1.0))(), "'forward' is reading 'local', a threading.local"),
    ],
    ids=["generator", "cycle", "local", "an object that reads one", "broken", "local that is read"],
)
def test_what_cannot_be_read_declines_by_name(module: nn.Module, named: str) -> None:
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            wrapper(rows(8))
        assert seen(wrapper) == (0, 0, {DeclineReason.CANNOT_PROVE: 3})
        assert named in str(wrapper.statistics().last_reason)


def test_what_belongs_to_the_machinery_is_no_state() -> None:
    """A logger, a lock, a system's random numbers, and another wrapper, which stands for its module."""
    module = Counters([], lambda holder: None)
    module.logger = logging.getLogger("ubatch.tests.guard")
    module.lock = threading.Lock()
    module.numbers = random.SystemRandom()
    with wrapped(nn.Linear(3, 3)) as other, wrapped(module, **FIRST) as wrapper:
        module.holder.append(other)
        module.trainer = collections.UserDict(model=wrapper)
        for number in range(3):
            logging.getLogger(f"ubatch.tests.guard.{number}").debug("another logger")
            wrapper(rows(8))
        assert wrapper.statistics().engaged == 2


def test_a_number_that_callers_count_does_not_end_overlap() -> None:
    module = Counters([], lambda holder: None)
    with wrapped(module, **FIRST) as wrapper:
        for step in range(2, 30):
            module.step = step
            wrapper(rows(8))
        assert wrapper.statistics().proved <= 6
        assert wrapper.statistics().engaged >= 22


def test_what_is_changed_behind_the_wrapper_is_proved_anew() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    module[0].centre = False
    module[0].register_forward_hook(lambda part, given, output: output - output.mean(0) if part.centre else output)
    with proved(module) as wrapper:
        module[0].centre = True
        for _ in range(3):
            torch.testing.assert_close(wrapper(rows(8)), module(rows(8)))
        assert wrapper.statistics().engaged == 1
