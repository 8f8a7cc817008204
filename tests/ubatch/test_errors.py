"""Messages: values of any size are cut, the nearest name is found quickly, a user's error gets notes of its lane."""

import time
from typing import Any

import pytest
import torch
from lanes import lane_pool, run
from torch import Tensor
from wrapper_cases import x_of
from wrapping import Plain, wrapped

from ubatch import dbo_register_recv_hook, dbo_yield, nearest
from ubatch.errors import describe, note, shown


@pytest.mark.parametrize("name", ["x" * 1_000_000, "serve_" * 200_000, "LlamaForCausalLM" + " " * 1_000_000])
def test_a_name_of_a_megabyte_has_no_near_one(name: str) -> None:
    began = time.process_time()
    tail = nearest(name, [f"{family}ForCausalLM" for family in ("Llama", "Qwen3Moe")])
    assert tail == ". Known: LlamaForCausalLM, Qwen3MoeForCausalLM"
    assert time.process_time() - began < 0.5


def test_typos_are_found_as_before() -> None:
    assert nearest("torch-dist", ["torch_dist", "local"]).startswith("; did you mean 'torch_dist'?")
    assert nearest("tensr_paralel_size", ["tensor_parallel_size"]).startswith("; did you mean")
    assert nearest("parallel_size_of_pipelines", ["tensor_parallel_size"]).startswith(".")
    assert nearest("anything", []) == ". Known: "


def test_values_are_cut() -> None:
    assert (shown("short"), shown([1, 2.5, None])) == ("'short'", "[1, 2.5, None]")
    for value in ("x" * 10**6, ["x" * 10**6] * 10**6, {"a" * 10**6: 1}, 10**400, [[list(range(1000))] * 99] * 99):
        assert len(shown(value)) <= 160
    assert shown("a" + "x" * 1000 + "z")[:3] == "'ax"
    assert shown("a" + "x" * 1000 + "z")[-2:] == "z'"


# ---------------------------------------------------------------------------------------------------------------- notes


class Refusing(Exception):
    def add_note(self, text: str) -> None:
        raise RuntimeError("no notes here")


class Shadowing(Exception):
    add_note = None  # type: ignore[assignment]


class Immutable(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__t"):  # Python itself sets the traceback
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


class OwnNotes(Exception):
    __notes__ = ()  # type: ignore[assignment]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


KINDS = [Refusing, Shadowing, Immutable, OwnNotes, Unprintable]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"schedule": "single_batch"}])
@pytest.mark.parametrize("place", ["lane", "hook"])
def test_the_error_comes_out_as_itself(kind: type[Exception], settings: dict[str, str], place: str) -> None:
    raised: list[Exception] = []
    fails = True

    def failing() -> None:
        raised.append(kind("it"))
        raise raised[-1]

    def forward(x: Tensor) -> Tensor:
        dbo_yield()
        if fails and place == "hook":
            dbo_register_recv_hook(failing)
            dbo_yield()
        elif fails:
            failing()
        return x * 1

    with wrapped(Plain(forward), **settings) as wrapper:
        with pytest.raises(kind) as caught:
            wrapper(x_of(4))
        assert caught.value is raised[0]
        fails = False
        assert torch.equal(wrapper(torch.ones(2, 3)), torch.ones(2, 3))


def test_notes_are_added_where_they_can_be() -> None:
    for kind in (Refusing, Shadowing, Unprintable, ValueError):
        error = kind("it")
        note(error, "noted")
        assert error.__notes__ == ["noted"]
    assert describe(Unprintable()) == "Unprintable (which cannot be printed)"
    assert describe(ValueError("x")) == "ValueError('x')"


def test_a_second_error_that_cannot_be_printed() -> None:
    def first() -> None:
        dbo_yield()
        raise ValueError("first")

    def second() -> None:
        try:
            while True:
                dbo_yield()
        finally:
            raise Unprintable

    with lane_pool() as pool, pytest.raises(ValueError, match="first") as caught:
        run(pool, first, second)
    assert "lane 1 also raised Unprintable (which cannot be printed) while it unwound" in caught.value.__notes__
