"""A process that is forked during a call of a wrapper: the child's wrapper works, or says why it does not."""

import os
import threading

import pytest
import torch
from children import exit_code, in_child
from torch import Tensor
from wrapping import Plain, only_rank, wrapped

from ubatch import ForkedLaneError, UBatchWrapper, dbo_yield

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

X = torch.arange(12.0).reshape(4, 3)


class Pausing:
    """A module that stops in the middle of a call, once, until the test lets it go on."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.pid = os.getpid()

    def __call__(self, x: Tensor) -> Tensor:
        dbo_yield()
        if os.getpid() == self.pid and not self.leave.is_set():
            self.inside.set()
            assert self.leave.wait(20)
        dbo_yield()
        return x + 1


def works(wrapper: UBatchWrapper) -> None:
    """In lanes, and unsplit."""
    engaged = wrapper.statistics().engaged
    for x in (X, X[:1], X):
        torch.testing.assert_close(wrapper(x), x + 1)
    assert wrapper.statistics().engaged >= engaged + 2


@pytest.mark.long
@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("settings", [{}, {"schedule": "single_batch"}])
def test_another_thread_forks_during_a_call(rows: int, settings: dict[str, str]) -> None:
    module = Pausing()
    with wrapped(Plain(module), **settings) as wrapper:
        results: list[Tensor] = []
        caller = threading.Thread(target=lambda: results.append(wrapper(X[:rows])))
        caller.start()
        assert module.inside.wait(20)

        def child() -> None:
            for x in (X, X[:1], X):
                torch.testing.assert_close(wrapper(x), x + 1)

        codes = [exit_code(in_child(child)) for _ in range(2)]
        module.leave.set()
        caller.join(20)
        assert codes == [0, 0]
        torch.testing.assert_close(results, [X[:rows] + 1])
        torch.testing.assert_close(wrapper(X), X + 1)


def test_the_wrapper_says_why_in_the_child_of_a_lane() -> None:
    codes: list[int] = []
    parent = os.getpid()

    def child() -> None:
        with pytest.raises(ForkedLaneError, match="in the child of lane 0"):
            wrapper(X)

    def forking(x: Tensor) -> Tensor:
        dbo_yield()
        if os.getpid() == parent and not codes:
            codes.append(exit_code(in_child(child)))
        dbo_yield()
        return x + 1

    with wrapped(Plain(forking)) as wrapper:
        torch.testing.assert_close(wrapper(X), X + 1)
        assert codes == [0]
        works(wrapper)


def test_a_fork_inside_an_unsplit_call_leaves_both_in_it() -> None:
    codes: list[int] = []

    def forking(x: Tensor) -> Tensor:
        if len(x) == 1 and not codes:
            codes.append(exit_code(in_child(lambda: None)))
        return x + 1

    with wrapped(Plain(forking)) as wrapper:
        torch.testing.assert_close(wrapper(X[:1]), X[:1] + 1)
        assert codes == [0]
        works(wrapper)


def test_a_group_of_one_works_in_the_child() -> None:
    with only_rank() as group, wrapped(Plain(lambda x: x + 1), group=group) as wrapper:
        works(wrapper)
        assert exit_code(in_child(lambda: works(wrapper))) == 0
        works(wrapper)
