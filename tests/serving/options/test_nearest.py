"""What an unknown name is said to mean: what it can mean, or nothing."""

from __future__ import annotations

import pytest

from serving.cli import COMMANDS
from serving.options import SERVE
from serving.options.flags.server_flags import ALIASES
from ubatch import nearest

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
