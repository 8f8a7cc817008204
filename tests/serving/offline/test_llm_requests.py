"""What a caller gives to `LLM`: prompts in every form, conversations; each field of `SamplingParams` has its effect."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from repository import TINY_CHAT
from tqdm import tqdm

from model_runner import RequestError
from serving import LLM, CompletionOutput, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from serving.offline.outputs import Logprob
from serving.offline.prompts import read_prompts

pytestmark = pytest.mark.long

USER = [{"role": "user", "content": "What is 3 + 4?"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: Any = {"max_num_seqs": 4, "kv_cache_memory": "16M", "dtype": "float32", "max_model_len": 256}
    with LLM(TINY_CHAT, scheduling_policy="priority", max_logprobs=5, **options) as llm:
        yield llm


def one(llm: LLM, prompt: Any = "import os\n", /, **fields: Any) -> CompletionOutput:
    (output,) = llm.generate(prompt, SamplingParams(**{**GREEDY, **fields}), use_tqdm=False)
    return output.outputs[0]


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts_come_in_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    several = [
        *("abc", ids, {"prompt": "abc"}, {"prompt_token_ids": ids}, TextPrompt(prompt="abc")),
        *(TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids, "prompt": "shown"}, tuple(ids)),
        *({"prompt": "abc", "multi_modal_data": None}, torch.tensor(ids), {"prompt": "abc", "multi_modal_data": {}}),
    ]
    outputs = llm.generate(several, SamplingParams(**GREEDY))
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({output.outputs[0].text for output in outputs}) == 1
    texts = ["abc", None, "abc", None, "abc", None, "shown", None, "abc", None, "abc"]
    assert [output.prompt for output in outputs] == texts
    for alone in several:
        (output,) = llm.generate(alone, SamplingParams(max_tokens=1))
        assert output.prompt_token_ids == ids


def test_one_prompt_is_told_from_several() -> None:
    counts = {"abc": 1, (): 0, (1, 2): 1, ((1, 2), (3,)): 2, ("a", "b", (1,)): 3}
    for given, count in counts.items():
        assert len(read_prompts(given)) == count
    assert len(read_prompts([torch.tensor([5]), torch.tensor([6])])) == 2
    assert [each.token_ids for each in read_prompts(torch.tensor([5, 6]))] == [[5, 6]]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({}, "a prompt is a text, a dict with 'prompt' or 'prompt_token_ids', or a list of token ids, not"),
        ({"prompt": None}, "a prompt is a text"),
        ({"prompt": 5}, "'prompt' of a prompt is a text, not 5"),
        ({"prompt_token_ids": "abc"}, "a prompt is a text"),
        ({"prompt_token_ids": [1.5]}, "a prompt is a text"),
        ({"text": "abc"}, "a prompt has no 'text'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data of a prompt is not supported"),
        ({"prompt_embeds": torch.zeros(1)}, "prompt_embeds of a prompt is not supported"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "models have no encoder"),
        (5, "a prompt is a text"),
        ([None], "a prompt is a text"),
        ([["a"]], "a prompt is a text"),
        ([1, 2.5], r"a list of token ids, not \[1, 2\.5\]"),
        ("a\ud800", "half of a surrogate pair"),
        ([[]], "is empty"),
        ([-1], "vocabulary"),
    ],
)
def test_other_prompts_are_refused(llm: LLM, prompt: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.generate(prompt)
    assert llm.statistics[0].num_running == 0


def test_arguments_of_generate(llm: LLM) -> None:
    (whole,) = llm.generate("a b c d e f g", SamplingParams(**GREEDY))
    kwargs = {"truncate_prompt_tokens": 3, "add_special_tokens": False}
    (cut,) = llm.generate("a b c d e f g", SamplingParams(**GREEDY), tokenization_kwargs=kwargs)
    assert cut.prompt_token_ids == whole.prompt_token_ids[-3:]
    bars: list[dict[str, Any]] = []

    def bar(**given: Any) -> tqdm:
        bars.append(given)
        return tqdm(**{**given, "disable": True})

    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=bar)
    assert bars[0]["total"] == 2
    assert llm.generate([]) == []
    first = llm.generate(["a"] * 3, SamplingParams(max_tokens=1), priority=[3, 2, 1])
    assert len(first) == 3
    wrong: dict[str, Any] = {
        "2 priorities for 1 prompts": {"priority": [1, 2]},
        "no LoRA adapters": {"lora_request": object()},
        "text only": {"mm_processor_kwargs": {"a": 1}},
        "may have add_special_tokens and truncate_prompt_tokens, not 'padding'": {
            "tokenization_kwargs": {"padding": 1}
        },
        "add_special_tokens must be True or False": {"tokenization_kwargs": {"add_special_tokens": 1}},
    }
    for why, keywords in wrong.items():
        with pytest.raises(RequestError, match=why):
            llm.generate("a", **keywords)
    with pytest.raises(RequestError, match="must be SamplingParams, or one each, not a int"):
        llm.generate("a", 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [SamplingParams()] * 2)


def test_a_priority_needs_its_policy() -> None:
    with LLM(TINY_CHAT, max_num_seqs=1, kv_cache_memory="2M", max_model_len=64) as llm:
        with pytest.raises(RequestError, match="scheduling_policy='priority'"):
            llm.generate("a", priority=[1])
        assert llm.generate("a", SamplingParams(max_tokens=1), priority=[0])


# -- fields ------------------------------------------------------------------------------------------------------------

CHANGES: list[dict[str, Any]] = [
    *({"temperature": 2.0, "seed": 1}, {"max_tokens": 3}, {"ignore_eos": False}, {"presence_penalty": 2.0}),
    *({"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}, {"logit_bias": {65: 100.0}}),
    *({"allowed_token_ids": [65, 66]}, {"bad_words": ["result"]}, {"stop_token_ids": list(range(3, 1000, 2))[:128]}),
    *({"stop": "."}, {"detokenize": False}, {"truncate_prompt_tokens": 1}, {"logprobs": 1}),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_field_changes_the_output(llm: LLM, change: dict[str, Any]) -> None:
    assert one(llm, **change) != one(llm)


@pytest.mark.wide
def test_fields_that_change_others(llm: LLM) -> None:
    hot: dict[str, Any] = {"temperature": 2.0, "seed": 1}
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert one(llm, **hot, **narrow).token_ids == one(llm).token_ids != one(llm, **hot).token_ids
    ended = one(llm, USER_PROMPT, ignore_eos=False, max_tokens=60)
    assert ended.finish_reason == "stop"
    longer = one(llm, USER_PROMPT, ignore_eos=False, max_tokens=60, min_tokens=len(ended.token_ids) + 1)
    assert len(longer.token_ids) > len(ended.token_ids)
    shown = one(llm, USER_PROMPT, ignore_eos=False, max_tokens=60, skip_special_tokens=False)
    kept = one(
        llm, USER_PROMPT, ignore_eos=False, max_tokens=60, skip_special_tokens=False, include_stop_str_in_output=True
    )
    assert (shown.text + "<|im_end|>", ended.stop_reason) == (kept.text, None)
    stop = ended.text[-3:]
    stopped = one(llm, USER_PROMPT, max_tokens=60, stop=[stop])
    included = one(llm, USER_PROMPT, max_tokens=60, stop=[stop], include_stop_str_in_output=True)
    assert (stopped.text + stop, stopped.stop_reason, stopped.finish_reason) == (included.text, stop, "stop")
    token = one(llm).token_ids[4]
    by_token = one(llm, stop_token_ids=[token])
    assert (by_token.stop_reason, by_token.token_ids[-1], by_token.finish_reason) == (token, token, "stop")


USER_PROMPT = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"


def test_an_output_ends_with_the_context(llm: LLM) -> None:
    """Where vLLM's does, too; `min_tokens` does not go beyond it."""
    for fields in ({"max_tokens": None}, {"max_tokens": 5000}, {"max_tokens": 5000, "min_tokens": 4000}):
        (output,) = llm.generate([65] * 250, SamplingParams(ignore_eos=True, **fields))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")
    with pytest.raises(RequestError, match="has 256 tokens; with one of output that is more"):
        llm.generate([65] * 256, SamplingParams(max_tokens=None))
    (cut,) = llm.generate([65] * 300, SamplingParams(max_tokens=6, ignore_eos=True, truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 250


def test_log_probabilities_are_tables_with_the_own_token_first(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=2, logprobs=2, prompt_logprobs=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([65, 66, 67], params)
    for only in output.outputs:
        assert [next(iter(table)) for table in only.logprobs] == only.token_ids
        assert {len(table) for table in only.logprobs} <= {2, 3}
        own = [table[token] for token, table in zip(only.token_ids, only.logprobs, strict=True)]
        assert only.cumulative_logprob == pytest.approx(sum(each.logprob for each in own))
        assert all(isinstance(each, Logprob) and each.decoded_token is not None for each in own)
        for table in only.logprobs:
            assert {1, 2} <= {each.rank for each in table.values()}
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [next(iter(table)) for table in rest if table is not None] == [66, 67]
    with pytest.raises(RequestError, match="logprobs is 6, and max_logprobs of the LLM is 5"):
        llm.generate("a", SamplingParams(logprobs=6))


def test_parameters_may_be_used_again_and_changed(llm: LLM) -> None:
    params = SamplingParams(**GREEDY)
    (first,) = llm.generate("abc", params)
    params.max_tokens = 3
    (second,) = llm.generate("abc", params)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids[:3]
    params.logit_bias = {5: 1000.0}
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate("abc", params)


# -- conversations -----------------------------------------------------------------------------------------------------


def test_one_conversation_is_told_from_several(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    assert [len(llm.chat(given, params)) for given in (USER, [USER], [USER] * 3, [])] == [1, 1, 3, 0]
    assert isinstance(llm.chat(USER, params)[0], RequestOutput)


WRONG_CHATS: list[tuple[Any, dict[str, Any], str]] = [
    ("hello", {}, "messages are a list of dicts"),
    ([[]], {}, "a conversation is a list of messages, at least one"),
    ([{"content": "a"}], {}, "messages.0 must be a dict with a role"),
    ([*USER, "a"], {}, "messages.1 must be a dict with a role"),
    ([{"role": "user", "content": 5}], {}, "messages.0.content must be a text or a list of parts"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "only text is read"),
    (USER, {"continue_final_message": True}, "cannot both be true"),
    (USER, {"chat_template": "{% if %}"}, "the chat template refuses the messages|chat_template is broken"),
    (USER, {"chat_template": 5}, "chat_template is a template's text"),
    (USER, {"chat_template_content_format": "xml"}, "must be one of auto, string, openai"),
    (USER, {"chat_template_kwargs": {"tokenize": True}}, "what the template itself asks for, not tokenize"),
    (USER, {"tools": ["weather"]}, "tools must be a list of dicts"),
    (USER, {"lora_request": object()}, "no LoRA adapters"),
]


@pytest.mark.parametrize(("messages", "keywords", "why"), WRONG_CHATS)
def test_other_conversations_are_refused(llm: LLM, messages: Any, keywords: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.chat(messages, SamplingParams(max_tokens=1), **keywords)


def test_variables_of_the_template(llm: LLM) -> None:
    (thinking,) = llm.chat(USER, SamplingParams(max_tokens=1))
    (not_thinking,) = llm.chat(USER, SamplingParams(max_tokens=1), chat_template_kwargs={"enable_thinking": False})
    assert str(not_thinking.prompt).endswith("<think>\n\n</think>\n\n")
    assert not str(thinking.prompt).endswith("<think>\n\n</think>\n\n")
