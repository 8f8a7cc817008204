"""Offline use: the reference's tokens, from one rank here or two elsewhere, and text with its stop strings."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import TINY_MOE

import serving.llm
from model_runner import FinishReason, ModelRunner, RequestError, SamplingParams, generate
from serving import LLM
from serving import SamplingParams as UserParams
from serving.offline.outputs import RunningOutput
from serving.requests import RequestInput, RequestOutput
from serving.text.detokenizer import TextStream
from ubatch import ConfigError, UBatchError

pytestmark = pytest.mark.long

TEXTS = ["Once upon a time", "The cat", "def main():", "In a hole in the ground there lived", "0 1 2 3"]
TEXTS += ["import os\n", "for name in names:\n    "]
BAD = ((714, 585), (384, 844), (1247, 14), (19,), (429, 1247, 348), (8,))
ALLOWED = range(3, 2048, 2)
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=20, temperature=0.9, seed=3),
    SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, seed=4),
    SamplingParams(max_tokens=9, repetition_penalty=1.3),
    SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=24, ignore_eos=True, bad_token_sequences=BAD),
    SamplingParams(max_tokens=24, temperature=0.7, seed=5, allowed_token_ids=ALLOWED, bad_token_sequences=BAD),  # type: ignore[arg-type]
]
ONE = SamplingParams(max_tokens=1)
SMALL = {"max_num_seqs": 8, "kv_cache_memory": "16M", "max_model_len": 512}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_MOE, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(llm: LLM) -> list[tuple[int, ...]]:
    """The plain loop's tokens, which admits everything at once and knows no scheduler."""
    with ModelRunner(TINY_MOE, max_num_seqs=8, kv_cache_memory=16 << 20) as runner:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        return [output.token_ids for output in generate(runner, prompts, PARAMS)]


def tokens(outputs: list) -> list[tuple[int, ...]]:  # type: ignore[type-arg]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_the_tokens_are_those_of_the_reference(llm: LLM, reference: list[tuple[int, ...]]) -> None:
    outputs = llm.generate(TEXTS, PARAMS)
    assert tokens(outputs) == reference
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text
        assert list(output.prompt_token_ids) == llm.tokenizer.encode(text)
        only = output.outputs[0]
        if only.finish_reason == "length":
            assert only.stop_reason is None
            assert only.text == llm.tokenizer.decode(only.token_ids, skip_special_tokens=True)
    scored = outputs[4]
    assert [next(iter(each)) for each in scored.outputs[0].logprobs] == scored.outputs[0].token_ids
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    assert scored.prompt_logprobs[0] is None


def test_only_allowed_tokens_come_and_no_bad_sequence(llm: LLM, reference: list[tuple[int, ...]]) -> None:
    def has_bad(tokens: tuple[int, ...]) -> bool:
        return any(tokens[at : at + len(bad)] == bad for bad in BAD for at in range(len(tokens)))

    assert not has_bad(reference[5])
    assert not has_bad(reference[6])
    assert set(reference[6]) <= set(ALLOWED)
    free = tokens(llm.generate(TEXTS[5:], SamplingParams(max_tokens=24, ignore_eos=True)))
    assert all(map(has_bad, free)), "the test is about tokens that would come"


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_schedule": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "prefill_first": True, "block_size": 4},
        {"speculative_algorithm": "ngram"},
        {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2},
        {"enable_single_batch_overlap": True, "prefill": {"schedule": "serial"}, "decode": {"token_threshold": 2}},
    ],
)
def test_settings_do_not_change_tokens(options: dict[str, object], reference: list[tuple[int, ...]]) -> None:
    with LLM(TINY_MOE, **{**SMALL, **options}) as llm:
        assert tokens(llm.generate(TEXTS, PARAMS)) == reference
        statistics = llm.statistics[0]
        assert (statistics.num_running, statistics.kv_usage) == (0, 0)
        if "enable_dbo" in options:
            assert statistics.steps["decode/engaged"] > 0
        if "enable_single_batch_overlap" in options:
            assert statistics.steps["decode/engaged_single"] > 0
        if "speculative_algorithm" in options:
            assert any(key.startswith("target_verify/") for key in statistics.steps)


def test_tokens_behind_a_stop_string_are_left_out(llm: LLM) -> None:
    """Though they came in the same step, as drafts that were right do."""
    ids = llm.tokenizer.encode("import os\nimport sys\n")
    text = TextStream(llm.tokenizer, prompt=[1], stop=["os"])
    output = RunningOutput(0, RequestInput("a", [1], ONE), text, at_once=False, silent_stop=None)
    assert not output.take(RequestOutput("a", ids, finish_reason=FinishReason.LENGTH))
    only = output.completion(None)
    assert (only.text, only.finish_reason, only.stop_reason) == ("import ", FinishReason.STOP, "os")
    assert llm.tokenizer.decode(only.token_ids) == "import os"


def test_bad_words_are_made_tokens(llm: LLM) -> None:
    """With a space before and without; each of several prompts keeps its own parameters."""
    prompts = ["import os\n", "def main(", "for name in names:\n    "]
    words = ["import os", "self", "name", "self"]
    params = [UserParams(temperature=0, max_tokens=count, ignore_eos=True, bad_words=words) for count in (24, 9, 24)]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24, 9, 24]
    for output in outputs:
        assert not any(word in output.outputs[0].text for word in ("import os", "self", "name"))
    (one,) = llm.generate(prompts[1], UserParams(temperature=0, bad_words="self"))
    assert one.outputs[0].text.startswith("obj")


TOO_MANY_BAD = SamplingParams(bad_token_sequences=tuple((n,) for n in range(256)))


@pytest.mark.parametrize(
    ("prompts", "params", "why"),
    [
        ([[1, 2], [9999]], ONE, "vocabulary"),
        ("a", SamplingParams(allowed_token_ids=(0,), min_tokens=1), "leaves no token"),
        ("a", SamplingParams(allowed_token_ids=(2048,)), r"allowed_token_ids.* has token 2048; the vocabulary is"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing_behind(
    llm: LLM, prompts: Any, params: SamplingParams, why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        llm.generate(prompts, params)
    statistics = llm.statistics[0]
    assert (statistics.num_running, statistics.num_waiting, statistics.kv_usage) == (0, 0, 0)
    assert len(llm.generate([[1, 2], [3]], ONE)) == 2


def test_former_arguments_of_generate_work_and_warn(llm: LLM, reference: list[tuple[int, ...]]) -> None:
    """With either kind of parameters, and without any."""
    stop = llm.tokenizer.decode(reference[0][3:4])
    users = UserParams(temperature=0, max_tokens=24)
    for params in (PARAMS[0], users, [users]):
        with pytest.warns(DeprecationWarning, match=r"generate\(stop=.* goes away .* serving.SamplingParams\(stop="):
            (output,) = llm.generate(TEXTS[0], params, stop=stop)
        assert output.outputs[0].stop_reason == stop
    assert users.stop == []
    with pytest.warns(DeprecationWarning, match="goes away"):
        (output,) = llm.generate("def main(", PARAMS[0], bad_words="self")
    assert output.outputs[0].text.startswith("obj")
    with pytest.warns(DeprecationWarning, match="goes away"):
        (output,) = llm.generate("import os\n", bad_words=["os"], skip_special_tokens=False)
    assert "os" not in output.outputs[0].text
    with (
        pytest.warns(DeprecationWarning, match="goes away"),
        pytest.raises(RequestError, match=r"^with the tokens of bad_words: bad_token_sequences has .* at most 256"),
    ):
        llm.generate("a", TOO_MANY_BAD, bad_words="self")
    assert llm.generate("a", ONE, stop=None)[0].outputs[0].token_ids
    for name, kind in (("LLMOutput", "RequestOutput"), ("CompletionResult", "CompletionOutput")):
        with pytest.warns(DeprecationWarning, match=f"It is serving.{kind}"):
            assert getattr(serving.llm, name) is getattr(serving, kind)


def test_where_no_token_is_left_only_that_request_ends(llm: LLM, reference: list[tuple[int, ...]]) -> None:
    """Behind its first token everything that is allowed is bad; what no output can begin with is refused before."""
    few = SamplingParams(max_tokens=9, allowed_token_ids=(5, 6), bad_token_sequences=((5, 5), (5, 6), (6, 5), (6, 6)))
    sampled = replace(few, temperature=0.8, seed=1, top_p=0.9)
    outputs = llm.generate([*TEXTS, *TEXTS[:2]], [*PARAMS, few, sampled])
    assert tokens(outputs[: len(TEXTS)]) == reference
    for output in outputs[len(TEXTS) :]:
        only = output.outputs[0]
        assert (only.finish_reason, len(only.token_ids)) == (FinishReason.NO_TOKEN_LEFT, 1)
        assert set(only.token_ids) <= {5, 6}
        assert "leave no token" in str(only.error)
        assert "checkpoint" not in str(only.error)
    assert (llm.statistics[0].num_running, llm.statistics[0].corrupted_requests) == (0, 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6, 11, 24])
def test_stop_strings_do_not_end_a_text_before_min_tokens(llm: LLM, min_tokens: int, include: bool) -> None:
    """vLLM's rule: they are looked for where they end in the text of tokens behind `min_tokens`."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, min_tokens=min_tokens)
    (plain,) = llm.generate("import os\n", replace(params, min_tokens=0))
    ids = plain.outputs[0].token_ids
    stop = ["never there", "rt os\nim", "os"]
    count, why = len(ids), (FinishReason.LENGTH, None)
    text = ""
    for place, token in enumerate(ids, 1):
        start = len(text)
        text += llm.tokenizer.decode([token])
        ends = [(text.find(each, max(0, start + 1 - len(each))), each) for each in stop]
        ends = [(at, each) for at, each in ends if at >= 0]
        if place > min_tokens and ends:
            at, found = min(ends, key=lambda end: end[0] + len(end[1]))
            text, count, why = text[: at + len(found) if include else at], place, (FinishReason.STOP, found)
            break
    asked = UserParams(temperature=0, max_tokens=24, ignore_eos=True, min_tokens=min_tokens, stop=stop)
    asked.include_stop_str_in_output = include
    (output,) = llm.generate("import os\n", asked)
    only = output.outputs[0]
    assert (only.text, only.token_ids) == (text, ids[:count])
    assert (only.finish_reason, only.stop_reason) == why
    assert count > min_tokens or min_tokens == 24
    assert llm.statistics[0].num_running == 0, "the engine does not go on behind a stop string"


def test_a_stop_token_is_the_last_token_and_no_text(llm: LLM, reference: list[tuple[int, ...]]) -> None:
    token = reference[0][5]
    first = reference[0].index(token)
    params = SamplingParams(max_tokens=24, stop_token_ids=(token,))
    only = llm.generate(list(llm.tokenizer.encode(TEXTS[0])), params)[0].outputs[0]
    assert only.token_ids == list(reference[0][: first + 1])
    assert (only.finish_reason, only.stop_reason) == (FinishReason.STOP, token)
    assert only.text == llm.tokenizer.decode(only.token_ids[:-1])


@pytest.mark.slow
def test_threads_that_generate_at_the_same_time_get_what_they_get_alone(
    llm: LLM, reference: list[tuple[int, ...]]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda _: tokens(llm.generate(TEXTS, PARAMS)), range(8)))
    assert together == [reference] * 8
    statistics = llm.statistics[0]
    assert (statistics.num_running, statistics.num_waiting, statistics.kv_usage) == (0, 0, 0)


def test_a_signal_handler_may_close_in_the_middle_of_a_call() -> None:
    llm = LLM(TINY_MOE, kv_cache_memory="8M", max_num_seqs=2)
    before = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    try:
        engine = llm._engine
        run = engine.run

        def told(requests: list[RequestInput], on_output: Callable[[RequestOutput], bool]) -> None:
            signal.raise_signal(signal.SIGUSR1)
            run(requests, on_output)

        engine.run = told  # type: ignore[method-assign]
        with suppress(Exception):  # what it was to give is gone
            llm.generate(TEXTS)
        with pytest.raises(UBatchError, match="was closed"):
            llm.generate(TEXTS)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm._engine
    run = engine.run

    def interrupted(requests: list[RequestInput], on_output: object) -> None:
        def interrupt(output: RequestOutput) -> bool:
            raise KeyboardInterrupt

        run(requests, interrupt)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS)
    assert llm.statistics[0].num_running == 0
    assert len(llm.generate(TEXTS, SamplingParams(max_tokens=1))) == len(TEXTS)


def test_a_profile_beside_an_earlier_one_leaves_it(llm: LLM, tmp_path: Path) -> None:
    """Even within a second. With one rank the second one was refused, because its file had the first one's name."""
    written = []
    for _ in range(2):
        llm.start_profile()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        written += llm.stop_profile(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert len(written) == 2


def test_without_a_tokenizer_tokens_go_in_and_out() -> None:
    with LLM(TINY_MOE, skip_tokenizer_init=True, **SMALL) as llm:
        only = llm.generate([1, 2, 3])[0].outputs[0]
        assert len(only.token_ids) == 16
        assert only.text == ""
        (scored,) = llm.generate([1, 2, 3], UserParams(logprobs=0, max_tokens=1))
        (table,) = scored.outputs[0].logprobs or ()
        assert next(iter(table.values())).decoded_token is None
        for prompt, params in (("text", None), ([1], UserParams(stop="x")), ([1], UserParams(bad_words="x"))):
            with pytest.raises(ConfigError, match="skip_tokenizer_init"):
                llm.generate(prompt, params)  # type: ignore[arg-type]
        for call in (llm.get_tokenizer, lambda: llm.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(ConfigError, match="skip_tokenizer_init"):
                call()
    with pytest.raises(UBatchError, match="closed"):
        llm.generate([1])


def go_on(llm: LLM) -> None:
    for _ in range(100):
        llm.generate([[1, 2]] * 16, SamplingParams(max_tokens=400, ignore_eos=True))


@pytest.mark.wide
def test_ranks_that_are_killed_are_started_again_and_no_token_changes(no_thread_leaks: None) -> None:
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    options = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_engine_restarts": 3}
    with LLM(TINY_MOE, **options, **SMALL) as llm:  # type: ignore[arg-type]
        undisturbed = tokens(llm.generate(TEXTS, long))
        (rank,) = [each for each in multiprocessing.active_children() if each.name == "rank 1"]
        timer = threading.Timer(0.1, rank.kill)
        timer.start()
        assert tokens(llm.generate(TEXTS, long)) == undisturbed
        assert timer.finished.is_set(), "it was killed meanwhile"
        timer.join()
        rank.join(10)
        assert rank.exitcode == -signal.SIGKILL


def test_two_ranks_give_the_same_and_can_be_interrupted(
    reference: list[tuple[int, ...]], no_thread_leaks: None
) -> None:
    threads = torch.get_num_threads()
    with LLM(TINY_MOE, data_parallel_size=2, enable_expert_parallel=True, **SMALL) as llm:
        assert tokens(llm.generate(TEXTS, PARAMS)) == reference
        assert tokens(llm.generate(TEXTS[0], PARAMS[0])) == reference[:1]
        counts = {sum(rank.steps.values()) for rank in llm.statistics.values()}
        assert len(counts) == 1, "they step together, and tell all of it, one without prompts too"
        # A real signal: it interrupts what the main thread waits for, as `_thread.interrupt_main` would not.
        timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            go_on(llm)
        timer.join()
        assert tokens(llm.generate(TEXTS, PARAMS)) == reference
        stop = llm.tokenizer.decode(reference[0][3:4])
        stopped = llm.generate(TEXTS[0], UserParams(temperature=0, max_tokens=24, stop=stop))
        assert stopped[0].outputs[0].finish_reason == "stop"
        assert set(llm.statistics) == {0, 1}
    assert torch.get_num_threads() == threads
