"""What the commands refuse: each wrong call is one plain line that says what is wrong and what to write instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import line_of, words_of
from repository import TINY_MOE

from serving.options import GENERATE, TUNE, resolve, resolve_settings
from serving.options.sources import read_keywords
from ubatch import ConfigError

EP = "--enable-expert-parallel"  # which `tune` always does, without a flag

CALLS: Mapping[str, str] = {
    **yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8")),
    f"--kv-cache-memory {'9' * 400}": "expected at least one byte, and less than 8 EiB",
    "--speculative-algorithm mtp": f"--speculative-algorithm mtp: {TINY_MOE} has no layer for multi-token prediction",
}

FILES: Mapping[str, str] = {
    "dbo-decode-token-treshold: 8": "unknown key 'dbo-decode-token-treshold'; did you mean 'dbo-decode-token-thr",
    "config: other.yaml": "unknown key 'config'",
    "zzzz: 1": "unknown key 'zzzz'; keys are the flags that --help shows, without dashes in front.",
    "null: 2": "null is no name of a setting; keys are the flags that --help shows",
    "named_model: x": "unknown key 'named_model'; use model.",
    "tokenizer: x": "use a checkpoint's folder with that tokenizer in it.",
    "mem-fraction-static: 0.5": "use gpu-memory-utilization.",
    "tp: 2": "use tensor-parallel-size.",
    "quantization: fp8": "use a checkpoint in fp8",
    "no-enable-dbo: true": "use enable-dbo: false.",
    "disable-radix-cache: true": "use enable-prefix-caching: false.",
    "Enable-Dbo: true": "did you mean 'enable-dbo'?",
    "split-dims: {x: 0}": "split-dims is for wrapped modules",
    # values
    "port: http": "port: it should be a valid integer, not 'http'",
    "port: '8000'": "port: it should be a valid integer, not '8000'",
    "port: true": "port: it should be a valid integer, not True",
    "port: 70000": "port: it should be at most 65535, not 70000",
    "enable-dbo: 1": "enable-dbo: it should be a valid boolean, not 1",
    "host: 2026-01-31": "host: datetime.date(2026, 1, 31) is no value for it",
    "emulated-link: [1]": "emulated-link: expected two numbers, microseconds and MB/s, not [1].",
    "emulated-link: 5": "expected two numbers, microseconds and MB/s, not 5.",
    "all2all-options: {a: [1]}": "expected true, false, a number or text for a, not",
    "all2all-options: {use-fp8: false, use_fp8: true}": "all2all-options: use_fp8 is given twice",
    "timeout_s: .inf": "timeout_s: it should be a finite number, not inf.",
    f"kv-cache-memory: {'9' * 400}": "expected at least one byte, and less than 8 EiB",
    f"kv-cache-memory: '{'9' * 400}G'": "expected at least one byte, and less than 8 EiB",
    "max-prefill-tokens-per-mixed-step: on": "expected a number of tokens, auto or off, not True",
    "max-prefill-tokens-per-mixed-step: '64'": "expected a number of tokens, auto or off, not '64'",
    "max-prefill-tokens-per-mixed-step: 64.5": "expected a number of tokens, auto or off, not 64.5",
    "max-prefill-tokens-per-mixed-step: [64]": "expected a number of tokens, auto or off, not [64]",
    "max-prefill-tokens-per-mixed-step:": "expected a number of tokens, auto or off, not None",
    # two values
    "max-num-seqs: 2\nmax_num_seqs: 3": "max-num-seqs in serve.yaml (2) and max_num_seqs in serve.yaml (3)",
    "num-ubatches: 2\nubatch-size: 3": "num-ubatches in serve.yaml (2) and ubatch-size in serve.yaml (3)",
    "ubatch-size: 4\ndbo-decode-token-threshold: 3": "dbo-decode-token-threshold in serve.yaml is 3, below ubatch",
    "decode: {schedule: serial}\nschedule-decode: single_batch": (
        "schedule-decode in serve.yaml ('single_batch') and decode in serve.yaml ('serial') are one setting"
    ),
    # schedules
    "decode: serial": "serve.yaml: decode: it should be a mapping, not 'serial'",
    "decode: {schedul: serial}": "decode in serve.yaml: unknown key 'schedul'; did you mean 'schedule'?",
    "decode: {schedule: serail}": "decode in serve.yaml: unknown schedule 'serail'; did you mean 'serial'?",
    "decode: {num_ubatches: 1}": "decode in serve.yaml: num_ubatches must be 2 to 8, not 1",
    "prefill: {num_ubatches: 4, token_threshold: 3}": "prefill: token_threshold is 3, below the 4 lanes",
    "schedules: {mine: {lane: 2}}": "schedule 'mine': unknown key 'lane'; did you mean 'lanes'?",
    "schedules: {serial: {}}": "schedules has 'serial', which is a schedule of this package",
    # YAML
    "- port": "must hold one mapping of settings, not list",
    "port: [": "serve.yaml, line 1, column 8 is not valid YAML: expected the node content, but found",
    "\x07": "serve.yaml is not valid YAML",
    "port: 1\nseed: 2\nport: 3": "line 3, column 1 is not valid YAML: 'port' is there twice, first in line 1",
    "port: 1\nport: 1": "line 2, column 1 is not valid YAML: 'port'",
    "{port: 1, 'port': 2}": "line 1, column 11 is not valid YAML: 'port'",
    "decode:\n  schedule: serial\n  schedule: plain": "line 3, column 3 is not valid YAML: 'schedule'",
    "schedules:\n  mine: {lanes: 2, lanes: 3}": "line 2, column 20 is not valid YAML: 'lanes'",
    "schedules:\n  mine: {lanes: 2}\n  mine: {lanes: 3}": "line 3, column 3 is not valid YAML: 'mine'",
    "schedules: &a {x: *a}": "the value contains itself, or is nested too deeply",
    "all2all-options: &a {x: *a}": "the value contains itself, or is nested too deeply",
    "schedules: " + "[" * 2000 + "]" * 2000: "nested too deeply",
}

CUDA: dict[str, Any] = {"enable_expert_parallel": True, "device": "cuda"}
MIXED = "max_prefill_tokens_per_mixed_step"
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seq": 1}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
    ({"tp": 1}, "use tensor_parallel_size."),
    ({"no_enable_dbo": 1}, "use enable_dbo=False."),
    ({"disable_cuda_graph": 1}, "use enforce_eager."),
    ({"named_model": 1}, "use model."),
    ({"max_num_seqs": "many"}, "max_num_seqs: it should be a valid integer"),
    ({"max_num_seqs": True}, "max_num_seqs: it should be a valid integer"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size: it should be at least 1"),
    ({"enable_dbo": object()}, "enable_dbo: <object"),
    ({"all2all_options": {"a": ITSELF}}, "all2all_options: the value contains itself"),
    ({"enable_expert_parallel": True}, "enable_expert_parallel needs"),
    ({"data_parallel_size": 3, "device": "cuda"}, "has 1 GPUs"),
    ({**CUDA, "data_parallel_size": 2}, "data_parallel_size: 2 processes on this machine, which has 1 GPUs"),
    ({**CUDA, "tensor_parallel_size": 2}, "tensor_parallel_size: 2 processes on this machine, which has 1 GPUs"),
    (
        {**CUDA, "tensor_parallel_size": 2, "data_parallel_size": 2},
        "data_parallel_size times tensor_parallel_size: 4 processes",
    ),
    ({MIXED: 0}, "at least 1"),
    ({MIXED: "some"}, "expected a number of tokens, auto or off"),
    ({MIXED: 15}, "is 15, below --block-size (16)"),
    ({MIXED: 2048}, "no step has more than --max-num-batched-tokens (2048)"),
    ({MIXED: 64, "prefill_first": True}, "has no effect with prefill_first"),
    ({MIXED: "auto", "enable_chunked_prefill": False}, "enable_chunked_prefill forbids that"),
    ({"speculative_algorithm": "ngram", "speculative_eagle_topk": 2}, "no effect with speculative_algorithm ngram"),
]


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[:80])
def test_a_wrong_call_is_one_clear_line(
    call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, gpus = words_of(call)
    monkeypatch.setattr(resolve, "count_gpus", lambda: gpus)
    if words[0] in ("serve", "generate", "tune", "simulate"):
        assert CALLS[call] in line_of(words, capsys)
        return
    assert CALLS[call] in line_of(["serve", str(TINY_MOE), *words], capsys)
    own = [word for word in words if call.startswith("BACKEND") and word != EP]
    for command, table, others in (("generate", GENERATE, ["--prompt=x", *words]), ("tune", TUNE, own)):
        flags = {
            word.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for word in others if word[:2] == "--"
        }
        if flags - {"prompt"} and flags <= table.flags.keys():
            assert CALLS[call] in line_of([command, str(TINY_MOE), *others], capsys)


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:60])
def test_a_wrong_file_is_one_clear_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(text)
    assert FILES[text] in line_of(["serve", str(TINY_MOE), "--config", "serve.yaml"], capsys)


@pytest.mark.parametrize(("keywords", "message"), KEYWORDS)
def test_wrong_keywords(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_settings(read_keywords({"model": TINY_MOE, **keywords}), gpus=1)
    assert message in str(refused.value)
