"""Messages about what a user wrote: values of any size are cut, and the nearest name is found quickly."""

from __future__ import annotations

import time

import pytest

from ubatch import nearest
from ubatch.errors import shown


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
    assert shown("short") == "'short'"
    assert shown([1, 2.5, None]) == "[1, 2.5, None]"
    for value in ("x" * 10**6, ["x" * 10**6] * 10**6, {"a" * 10**6: 1}, 10**400, [[list(range(1000))] * 99] * 99):
        assert len(shown(value)) <= 160
    assert shown("a" + "x" * 1000 + "z")[:3] == "'ax"
    assert shown("a" + "x" * 1000 + "z")[-2:] == "z'"
