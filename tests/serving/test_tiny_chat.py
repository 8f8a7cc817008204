"""The example checkpoint in the form of chat models: two end tokens, a ChatML template with tools and thinking."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import TINY_CHAT, TINY_MOE

from model_runner import Checkpoint, SamplingParams, model_class, read_model_config
from serving import LLM
from serving.text.chat_template import ChatTemplate
from serving.text.tokenizer import check_chat_template, load_tokenizer

pytestmark = pytest.mark.long

SMALL = {"max_num_seqs": 4, "kv_cache_memory": "16M"}
SUM = [{"role": "user", "content": "What is 3 + 4?"}]
WARM = [{"role": "user", "content": "How warm is it in Rome?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_CHAT)


@pytest.fixture(scope="module")
def template(tokenizer: Any) -> ChatTemplate:
    return check_chat_template(tokenizer, TINY_CHAT)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_CHAT, **SMALL) as llm:
        yield llm


def written(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    return template.write(template.normalised(messages, continued=False), add_generation_prompt=True, **options)


def test_it_is_small_and_long() -> None:
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (TINY_CHAT, TINY_MOE)]
    assert sizes[0] <= sizes[1]
    assert json.loads((TINY_CHAT / "config.json").read_text())["max_position_embeddings"] >= 8192


def test_it_has_two_end_tokens(tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    checkpoint = Checkpoint(TINY_CHAT)
    kind = model_class(checkpoint.architecture, checkpoint.config)
    config = read_model_config(kind, checkpoint.config, checkpoint.generation_config())
    assert set(config.eos_token_ids) == set(ends)
    assert tokenizer.eos_token_id == ends[0]


def test_it_answers_and_ends_its_turn(llm: LLM, template: ChatTemplate) -> None:
    [output] = llm.generate(written(template, SUM), SamplingParams(max_tokens=200), use_tqdm=False)
    [answer] = output.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None), "vLLM does not name the end token"
    assert answer.token_ids[-1] == llm.tokenizer.eos_token_id
    assert answer.text.startswith("<think>\n")
    assert "</think>\n\n" in answer.text
    thoughtless = written(template, SUM, enable_thinking=False)
    assert thoughtless.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_it_calls_a_tool(llm: LLM, template: ChatTemplate) -> None:
    prompt = written(template, WARM, tools=[WEATHER])
    [output] = llm.generate(prompt, SamplingParams(max_tokens=200), use_tqdm=False)
    text = output.outputs[0].text
    call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    assert (call["name"], list(call["arguments"])) == ("weather", ["city"])


def test_the_template_writes_a_call_as_the_model_does(template: ChatTemplate) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I ask."}
    result = {"role": "tool", "tool_call_id": "c1", "content": "22"}
    text = written(template, [*WARM, calling, result])
    assert text == (
        "<|im_start|>user\nHow warm is it in Rome?<|im_end|>\n<|im_start|>assistant\n<think>\nI ask.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n22\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_ends_if_only_the_tokenizer_names_its_end(
    tmp_path: Path, tokenizer: Any, template: ChatTemplate
) -> None:
    """As in a fine-tune whose configs are the base model's; before, it ran to `length` with an empty text."""
    model = tmp_path / "fine-tune"
    shutil.copytree(TINY_CHAT, model)
    base = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((model / name).read_text()) | {"eos_token_id": base}
        (model / name).write_text(json.dumps(values))
    with LLM(model, **SMALL) as llm:
        [output] = llm.generate(written(template, SUM), SamplingParams(max_tokens=200), use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids[-1]) == ("stop", tokenizer.eos_token_id)
