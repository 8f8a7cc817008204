"""Every flag of `vllm serve` is done here, or its refusal says what to do; what an unknown name is said to mean."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

from serving.cli import COMMANDS
from serving.options import SERVE, read_layers
from serving.options.flags.foreign import foreign_flags
from serving.options.flags.server_flags import ALIASES
from serving.options.flags.tables import Own
from serving.options.sources import _hint, read_keywords
from ubatch import ConfigError, nearest

_LIST = (ROOT / "tests" / "support" / "vllm_serve_flags.txt").read_text(encoding="utf-8")
FLAGS = [word for line in _LIST.splitlines() if not line.startswith("#") for word in line.split()]
OURS = {*SERVE.flags, *Own.model_fields}
LATER = {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "chat_template_content_format"}
LATER |= {"exclude_tools_when_tool_choice_none"}
"""Of tools and of reasoning: done by code that has its own tests, and no row in a table of refusals."""
ENDS = ("; use ", ": leave it out, ", ": it is not offered, ")


def snake(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


_FIELDS = [field for group in SERVE.groups.values() for field in group.model_fields.values()]
SHORT = {each.alias for field in _FIELDS for each in field.metadata if getattr(each, "alias", None)}
REFUSED = [flag for flag in FLAGS if flag not in SHORT and snake(flag) not in OURS | LATER]


def test_the_list_is_vllms() -> None:
    assert len(FLAGS) == len(set(FLAGS)) > 300
    assert len(FLAGS) - len(REFUSED) > 60
    assert {"--max-logprobs", "--chat-template", "--seed", "--root-path", "-dp"}.isdisjoint(REFUSED)


@pytest.mark.parametrize("flag", [*REFUSED, "--no-async-scheduling", "--no-enable-lora", "--no-enable-log-outputs"])
def test_a_flag_that_is_not_here_says_what_to_do(flag: str) -> None:
    hint = _hint(SERVE, snake(flag))
    assert hint.startswith(ENDS), hint
    assert hint.endswith(".")
    assert not re.search(r"--help|did you mean|\.\.$|;\.|, ,", hint)
    assert len(hint) < 200
    assert hint.startswith(ENDS[:2]) or ";" in hint, "what is not offered needs something to do"
    for named in re.findall(r"--(?:no-)?([a-z0-9-]+)", hint):
        assert snake(named).rstrip("_") in OURS or named == "speculative-", f"--{named} is no flag here"


def test_no_row_is_a_flag_of_ours_and_none_is_in_two_tables() -> None:
    names = [name for table in foreign_flags().values() for name in table]
    assert len(names) == len(set(names))
    assert set(names) & {*SERVE.flags, *SERVE.settings} == set()
    assert set(names) & ALIASES.keys() <= {"named_model"}
    assert LATER.isdisjoint(names)


def test_short_forms_are_vllms() -> None:
    layers, _ = read_layers(SERVE, "", "", ["-dp", "2", "-ep", "-tp", "4", "-n", "2", "-r", "1"])
    given = {name: setting.value for name, setting in layers[-1].items()}
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True, "tensor_parallel_size": 4}
    assert given == {**ranks, "nnodes": 2, "node_rank": 1}


def test_vllms_names_of_values() -> None:
    words = ["--dtype", "half", "--kv-cache-dtype", "fp8_e4m3"]
    layers, _ = read_layers(SERVE, "", "", words)
    assert {name: setting.value for name, setting in layers[-1].items()} == {
        "dtype": "float16",
        "kv_cache_dtype": "fp8",
    }
    assert read_keywords({"dtype": "float"})["dtype"].value == "float32"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kv_cache_memory_bytes", "; use kv_cache_memory."),
        ("disable_radix_cache", "; use enable_prefix_caching=False."),
        ("disable_log_stats", f": leave it out, {foreign_flags()['NOT_NEEDED']['disable_log_stats']}."),
        ("swap_space", "use more ranks, or kv_cache_memory for a smaller cache."),
    ],
)
def test_keywords_are_explained_as_keywords(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_keywords({name: 1})
    assert str(refused.value).startswith(f"unknown option '{name}'")
    assert str(refused.value).endswith(hint)


# -- what an unknown name is said to mean ------------------------------------------------------------------------------

OPTIONS = {*SERVE.settings, *ALIASES}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_num_seq", "max_num_seqs"),
        ("num_seqs", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("enable-prefix-cachnig", "enable_prefix_caching"),
        ("Enable_Dbo", "enable_dbo"),
        ("dbo_decode_threshold", "dbo_decode_token_threshold"),
        ("ubatches", "num_ubatches"),
        ("speculative_model", "speculative_draft_model_path"),
    ],
)
def test_slips_and_words_left_out_are_found(written: str, meant: str) -> None:
    assert nearest(written, OPTIONS).startswith(f"; did you mean {meant!r}? Known: ")


@pytest.mark.parametrize(
    "written",
    [
        *("pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_rank", "enable_lora"),
        "enable_elastic_ep",
        *("long_prefill_token_threshold", "max_running_requests", "mamba_cache_dtype", "quantization", "tokenizer"),
        *("disable_prefix_caching", "disable_radix_cache", "tp", "tp_size"),
        *("watchdog_timeout", "distributed_executor_backend", "backend", "size", ""),
        "dbo_token_threshold",  # that of decode, or that of prefill?
    ],
)
def test_other_options_are_not_taken_for_ours(written: str) -> None:
    assert nearest(written, OPTIONS).startswith(". Known: ")


def test_two_letters_that_change_places_are_one_slip() -> None:
    assert "did you mean 'torch'" in nearest("torhc", ("torch", "triton"))


def test_commands() -> None:
    assert "did you mean 'generate'" in nearest("generat", COMMANDS)
    assert "did you mean 'bench serve'" in nearest("bench-serve", COMMANDS)
    for other in ("run", "chat", "train", "test", "complete", "plans"):
        assert "did you mean" not in nearest(other, COMMANDS), other
