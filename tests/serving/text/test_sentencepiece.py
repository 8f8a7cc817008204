"""With a tokenizer of SentencePiece's kind, an output goes on from its prompt: the first token keeps its space.

Its tokenizer is small: spaces belong to tokens, rare characters are byte tokens, and the decoder strips the space of a
text's first token, as in Llama 2 and Mixtral.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from api_clients import app_of, chat, complete, stream
from checkpoints import make_checkpoint
from fake_engine import FakeEngine
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from model_runner import SamplingParams
from serving import LLM

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "The cat sat on the mat.",
    "Once upon a time there was a small house.",
    "A house on the hill, and a cat in it.",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{% if not loop.last %}</s>{% endif %}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; a text begins with `<s>`."""
    trained = Tokenizer(models.BPE(unk_token=UNKNOWN))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [UNKNOWN, BEGIN, END, *BYTES]
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    written = json.loads(trained.to_str())
    written["model"]["byte_fallback"] = True
    written["added_tokens"] = written["added_tokens"][: -len(BYTES)]  # bytes are tokens like others
    tokenizer = Tokenizer.from_str(json.dumps(written))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, chat_template=TEMPLATE
    )


def make_sentencepiece_checkpoint(path: Path) -> Path:
    """A random Llama at `path`, with this tokenizer."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save_pretrained(path)
    return make_checkpoint(path, "Llama", vocab_size=len(tokenizer))


pytestmark = pytest.mark.long

PROMPT, OUTPUT = "The cat", " sat on the mat."
HALF = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "A house"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return sentencepiece_tokenizer()


def says(tokenizer: Any, text: str = OUTPUT) -> FastAPI:
    """An application that answers everything with this text."""
    ids = [*tokenizer.encode(text.removeprefix(" "), add_special_tokens=False), tokenizer.eos_token_id]
    app = app_of(FakeEngine(reply=lambda request: ids))
    app.state.service.tokenizer = tokenizer
    return app


def test_the_tokenizer_is_of_this_kind(tokenizer: Any) -> None:
    ids = tokenizer.encode(PROMPT + OUTPUT)
    assert tokenizer.decode(ids, skip_special_tokens=True) == PROMPT + OUTPUT
    place = next(place for place in range(len(ids)) if tokenizer.decode(ids[:place]).endswith("cat"))
    assert tokenizer.decode(ids[place:]) == OUTPUT.removeprefix(" ")
    assert tokenizer.decode(tokenizer.encode("é\n", add_special_tokens=False)) == "é\n"


@pytest.mark.parametrize("prompt", [PROMPT, None])
def test_a_completion(tokenizer: Any, prompt: str | None) -> None:
    echo = PROMPT if prompt else f"<s> {PROMPT}"  # that of token ids has all of them
    body = {"prompt": prompt or tokenizer.encode(PROMPT), "max_tokens": 50}
    assert complete(says(tokenizer), body)["choices"][0]["text"] == OUTPUT
    choice = complete(says(tokenizer), {**body, "echo": True, "logprobs": 0})["choices"][0]
    assert choice["text"] == echo + OUTPUT
    places = choice["logprobs"]["text_offset"]
    first = len(tokenizer.encode(PROMPT))
    assert places[first : first + 2] == [len(echo), len(echo) + len(" sat")]
    streamed = stream(says(tokenizer), "/v1/completions", {**body, "echo": True})
    assert "".join(event["choices"][0]["text"] for event in streamed) == echo + OUTPUT


def test_a_stop_string_that_begins_with_a_space(tokenizer: Any) -> None:
    choice = complete(says(tokenizer), {"prompt": PROMPT, "max_tokens": 50, "stop": " sat"})["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_a_continued_message(tokenizer: Any) -> None:
    app = says(tokenizer, " on the hill")
    body = {"messages": HALF, "continue_final_message": True}
    assert chat(app, body)["choices"][0]["message"]["content"] == " on the hill"
    assert chat(app, {**body, "echo": True})["choices"][0]["message"]["content"] == "A house on the hill"


def test_offline(tmp_path: Path) -> None:
    """Whatever the model writes, prompt and output are the text of all tokens."""
    with LLM(make_sentencepiece_checkpoint(tmp_path), max_num_seqs=4, kv_cache_memory="8M") as llm:
        words = [token for piece, token in llm.tokenizer.get_vocab().items() if piece.startswith("▁")]
        params = SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=words)
        for prompt in (PROMPT, llm.tokenizer.encode(PROMPT)):
            [output] = llm.generate(prompt, params, use_tqdm=False)
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            assert output.outputs[0].text.startswith(" ")
            assert PROMPT + output.outputs[0].text == llm.tokenizer.decode(ids, skip_special_tokens=True)
