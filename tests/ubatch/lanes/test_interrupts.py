"""Ctrl-C before any line of the caller: the call ends, and the wrapper works at once."""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from fake_graphs import FakeGraphs
from interrupting import PACKAGE, PLACES, AtOnce, interrupted_at, lines_of, nothing_is_left
from lanes import lane_threads, no_lane_threads_within, within
from torch import Tensor
from wrapper_cases import Model, x_of
from wrapping import only_rank

from ubatch import CommGroup, CUDAGraphMode, UBatchConfig, UBatchWrapper

pytestmark = pytest.mark.long

LANES = 2
LOW = {"dbo_decode_token_threshold": LANES, "dbo_prefill_token_threshold": LANES, "timeout_s": 20.0, "verify": "off"}


class Case:
    """A wrapper, and calls of it. What is interrupted is a replay if it has `graphs`, and has no hang check if it is
    `patient`."""

    def __init__(
        self, rows: int = 4, graphs: bool = False, intercept: bool = False, patient: bool = False, **settings: Any
    ) -> None:
        self.model, self.x, self.graphs, self.patient = Model().eval(), x_of(rows), graphs, patient
        with torch.no_grad():
            self.expected = self.model(self.x)
        options: dict[str, Any] = {"cudagraph_mode": CUDAGraphMode.FULL, "graphs": FakeGraphs()} if graphs else {}
        config = UBatchConfig(**{**LOW, **settings})
        self.wrapper = UBatchWrapper(self.model, config, intercept_collectives=intercept, **options)

    @torch.no_grad()
    def call(self) -> Tensor:
        with self.wrapper.no_timeout() if self.patient else nullcontext():
            return self.wrapper(self.x)

    @torch.no_grad()
    def capture(self) -> None:
        self.wrapper.capture(self.x)

    def check(self) -> None:
        """Everything is as after any other call."""
        nothing_is_left()
        with AtOnce():
            output = self.call()
        torch.testing.assert_close(output, self.expected)
        nothing_is_left()
        assert within(5, lambda: len(lane_threads()) <= LANES)


MODES: dict[str, dict[str, Any]] = {
    "lanes": {},
    "unsplit": {"rows": 1},
    "one lane with chunks": {"schedule": "single_batch"},
    "no hang check, ranges": {"patient": True, "profile_ranges": True},
    "replay": {"graphs": True},
    "intercepting": {"intercept": True},
    "a group of one": {"group": True},
    "unsplit, a group of one": {"rows": 1, "group": True},
    "proving": {"verify": "always"},
}


@pytest.fixture(scope="module")
def group() -> Iterator[CommGroup]:
    with only_rank() as made:
        yield made


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Case]]:
    """Makes a case of a mode; all are closed at the end."""
    made: list[Case] = []

    def make(mode: str) -> Case:
        settings = dict(MODES[mode])
        if settings.get("group"):
            settings["group"] = request.getfixturevalue("group")
        made.append(Case(**settings))
        return made[-1]

    functions = {name: value for name, value in vars(functional).items() if callable(value)}
    yield make
    torch.set_grad_enabled(True)  # Ctrl-C at any time also comes while torch's own `no_grad` begins or ends
    for case in made:
        case.wrapper.close()
    assert no_lane_threads_within(5)
    assert {name: value for name, value in vars(functional).items() if callable(value)} == functions


def interrupt_everywhere(
    call: Callable[[], object], check: Callable[[], None], places: tuple[str, ...] = PLACES, step: int = 1
) -> int:
    """Press Ctrl-C once before every line that `call` runs, and check after each; returns how many there were."""
    lines = lines_of(call, places)
    for number in range(0, lines, step):
        error = interrupted_at(number, call, places)
        assert error is None or type(error) is KeyboardInterrupt, repr(error)
        try:
            check()
        except BaseException as failed:
            failed.add_note(f"interrupted at line event {number}: {error}")
            raise
    return lines


SLOW = frozenset({"intercepting", "no hang check, ranges", "a group of one", "one lane with chunks"})


LATER = [pytest.param(mode, marks=pytest.mark.slow if mode in SLOW else []) for mode in MODES if mode != "proving"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", LATER)
def test_later_calls(mode: str, make: Callable[[str], Case]) -> None:
    case = make(mode)
    if case.graphs:
        case.capture()
    case.call()  # what is imported and compiled late is there now
    case.check()
    before = case.wrapper.statistics()
    lines = interrupt_everywhere(case.call, case.check)
    after = case.wrapper.statistics()
    assert not case.wrapper._ubatch_wrapped.execution._patient
    assert lines > 100
    assert after.engaged - before.engaged >= (lines if before.engaged else 0), "every call that checks overlapped"
    assert after.engaged_single - before.engaged_single >= (lines if before.engaged_single else 0)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mode", "step"),
    [
        pytest.param("lanes", 9, id="lanes"),
        pytest.param("lanes", 1, id="lanes, every line", marks=pytest.mark.slow),
        pytest.param("one lane with chunks", 1, id="one lane with chunks", marks=pytest.mark.slow),
        pytest.param("intercepting", 1, id="intercepting", marks=pytest.mark.slow),
    ],
)
def test_first_calls(mode: str, step: int, make: Callable[[str], Case]) -> None:
    cases = [make(mode)]

    def call() -> None:
        cases[-1].call()

    def check() -> None:
        cases[-1].check()
        cases[-1].wrapper.close()
        cases.append(make(mode))

    cases[0].call()
    check()
    interrupt_everywhere(call, check, step=step)


@pytest.mark.slow
def test_proving_calls(make: Callable[[str], Case]) -> None:
    case = make("proving")
    case.call()
    case.check()
    interrupt_everywhere(case.call, case.check, PACKAGE, 11)
    proved = case.wrapper.statistics().proved
    case.check()
    assert case.wrapper.statistics().proved == proved + 1


@pytest.mark.slow
def test_captures(make: Callable[[str], Case]) -> None:
    case = make("replay")
    case.capture()
    case.check()
    interrupt_everywhere(case.capture, case.check, PACKAGE, 3)  # the fake's own `with` statements are not under test
    case.capture()
    replays = case.wrapper.statistics().graph_replays
    case.check()
    assert case.wrapper.statistics().graph_replays == replays + 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a `__del__` of torch's
@pytest.mark.parametrize("mode", ["lanes", "unsplit", "one lane with chunks"])
def test_signals_at_any_time(mode: str, make: Callable[[str], Case]) -> None:
    """The real thing, which may also come within a line."""
    case = make(mode)
    case.call()
    case.check()
    chance, main = random.Random(0), threading.main_thread().ident
    came = 0
    for _ in range(40):
        pressed, armed = threading.Event(), threading.Event()
        seconds = chance.uniform(0.0, 0.01)

        def press(seconds: float = seconds, armed: threading.Event = armed, pressed: threading.Event = pressed) -> None:
            armed.wait(20)
            time.sleep(seconds)
            signal.pthread_kill(main, signal.SIGINT)
            pressed.set()

        presser = threading.Thread(target=press, name="presser")
        presser.start()
        try:
            armed.set()
            while not pressed.is_set():
                case.call()
        except KeyboardInterrupt:
            came += 1
        presser.join(20)
        case.check()
    assert came > 20
