"""Train the small chat checkpoint that tests and examples load: tiny-chat, a Qwen3-MoE in the form of chat models.

Its chat template is ChatML with tools and thinking. It ends a turn with `<|im_end|>`, which its tokenizer names, and a
text with `<|endoftext|>`; both are in `generation_config.json`. It has 8192 positions.

The training text is conversations that this script makes: what functions of Python's standard library do, as their
docstrings say, sums with a thought before the answer, and questions that a tool answers. The tokenizer has 1024 tokens,
the model 0.87 M parameters (3 layers, 8 experts, top 2), the folder 1.8 MB. Nothing is downloaded. It learns the form
of an answer, a thought and a call, and little of what is asked.

    python examples/train_tiny_chat.py                            # the committed checkpoint, examples/models/tiny-chat
    python examples/train_tiny_chat.py --steps 5 --out /tmp/tiny  # smoke test

The default run took 2.4 minutes on one of 2 CPU cores that other jobs used too, and ended at a loss of 0.88 on training
text and 1.20 on held-out files (nats per token, weights already rounded to bf16; measured with Python 3.11, torch 2.13,
transformers 5.23). As with `train_tiny_moe.py`, the same seed, thread count, Python and library versions give the same
bytes.
"""

import argparse
import ast
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from train_tiny_moe import END_OF_TEXT, build_model, byte_level_bpe, make_parser, prepare, run_script, train_and_save
from transformers import GenerationConfig, PreTrainedTokenizerFast

from serving.workbench.bench.corpus import read_corpus

DEFAULT_OUT = Path(__file__).resolve().parent / "models" / "tiny-chat"
DEFAULT_STEPS = 400

BEGIN_TURN, END_TURN = "<|im_start|>", "<|im_end|>"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens that are part of the text: they are not special, so they are shown."""

VOCAB_SIZE = 1024
POSITIONS = 8192
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these tools:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\nA call is a JSON object with name and arguments, between <tool_call> and </tool_call>.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first and tools %}
    {%- elif message.role in ['system', 'user'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > last.user %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('There is no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

Conversation = dict[str, Any]
"""Arguments of `apply_chat_template`, and the `answer` that is written behind its text."""

CITIES = ["Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Quito", "Paris", "Delhi", "Accra", "Perth"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


# -- what is talked about --------------------------------------------------------------------------------------------


def functions(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Name and first sentence of the functions that have a docstring."""
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # a file for another version
        for node in ast.walk(tree):
            told = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if told and not node.name.startswith("_"):  # type: ignore[attr-defined]
                yield node.name, " ".join(told.partition("\n\n")[0].split())[:200]  # type: ignore[attr-defined]


def about_functions(texts: list[str]) -> Iterator[Conversation]:
    """Questions about functions, answered without a thought."""
    for name, told in functions(texts):
        messages = [{"role": "user", "content": f"What does {name} do?"}]
        yield {"conversation": messages, "enable_thinking": False, "answer": told}


def sums(count: int, dice: random.Random) -> Iterator[Conversation]:
    """Sums, with a thought before the answer; some ask to be short."""
    for _ in range(count):
        one, two = dice.randrange(10), dice.randrange(10)
        messages = [{"role": "user", "content": f"What is {one} + {two}?"}]
        if dice.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be short."})
        thought = f"<think>\n{one} + {two} is {one + two}.\n</think>\n\n"
        yield {"conversation": messages, "answer": f"{thought}{one + two}"}


def tool_calls(count: int, dice: random.Random) -> Iterator[Conversation]:
    """Questions that a tool answers: the call, and what is said after its result."""
    for place in range(count):
        city, degrees = dice.choice(CITIES), dice.randrange(40)
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"How warm is it in {city}?"}]
        thought = f"<think>\nI ask for the weather in {city}.\n</think>\n\n"
        call = {"name": "weather", "arguments": {"city": city}}
        answer = f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"
        if place % 2:
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
            messages.append({"role": "tool", "content": str(degrees)})
            thought = f"<think>\nThe result is {degrees}.\n</think>\n\n"
            answer = f"{thought}It is {degrees} degrees in {city}."
        yield {"conversation": messages, "tools": [WEATHER], "answer": answer}


def make_texts(texts: list[str], seed: int) -> list[str]:
    """All conversations as text, shuffled, each ended by the end-of-text token."""
    dice = random.Random(seed)
    made = list(about_functions(texts))
    made += [*sums(len(made) // 2, dice), *tool_calls(len(made) // 2, dice)]
    dice.shuffle(made)
    writer = make_tokenizer([])  # it only writes
    written = []
    for conversation in made:
        answer = conversation.pop("answer")
        prompt = writer.apply_chat_template(**conversation, tokenize=False, add_generation_prompt=True)
        written.append(f"{prompt}{answer}{END_TURN}\n{END_OF_TEXT}")
    return written


# -- tokenizer, training, saving -------------------------------------------------------------------------------------


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains the tokenizer. It ends a turn, not a text; that is all that its file says."""
    words = [re.sub(r"<.*?>", "", text) for text in texts]  # without the marks, which are tokens anyway
    backend = byte_level_bpe(words, VOCAB_SIZE - len(MARKS), [END_OF_TEXT, BEGIN_TURN, END_TURN])
    backend.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts in one stream of ids, int64 `[num_tokens]`."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def run(args: argparse.Namespace) -> None:
    prepare(args)
    corpus = read_corpus(args.seed)
    texts = make_texts(corpus.train, args.seed)
    tokenizer = make_tokenizer(texts[:2000])
    stream, held_out = encode(tokenizer, texts), encode(tokenizer, make_texts(corpus.held_out, args.seed + 1))
    end_of_text, end_turn = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_TURN])
    model = build_model(end_of_text, **SIZES)
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=end_of_text, eos_token_id=[end_turn, end_of_text], pad_token_id=end_of_text
    )
    print(
        f"{len(texts)} conversations, {len(stream):,} tokens; {model.num_parameters():,} parameters; {args.steps} steps"
    )
    train_and_save(model, tokenizer, (stream, held_out), args, most_windows=64)


def main() -> int:
    parser = make_parser(
        "Train a tiny chat model on conversations that this script makes, and save it as a Hugging Face checkpoint. No "
        "downloads; a few minutes on 2 CPU cores.",
        DEFAULT_STEPS,
    )
    parser.set_defaults(threads=1)  # a model this small gains little from a second one
    return run_script(parser, DEFAULT_OUT, run)


if __name__ == "__main__":
    sys.exit(main())
