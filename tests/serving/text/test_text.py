"""Text as tokens come: whole characters only, equal to what `decode` gives for all of them, cut at stop strings.

And what a checkpoint without a usable tokenizer is told: at once, in one line, by whatever needs text.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from repository import TINY_MOE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import serving.llm
import serving.offline.opening
from model_runner import FinishReason
from serving import LLM
from serving.cli import main
from serving.requests import RequestOutput
from serving.text.detokenizer import Detokenizer, TextStream
from serving.text.tokenizer import Vocabulary, check_chat_template, load_tokenizer
from ubatch import ConfigError

WORDS = ["▁", "▁the", "▁a", "the", "s", "▁▁", "é", "中", ".", "▁.", "�"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def word_level(words: list[str], decoder: Any) -> Any:
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def llama_like() -> Any:
    """Byte tokens for rare characters, and a leading space that is stripped: as in Llama 2 and Mixtral."""
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return word_level([*WORDS, *BYTES], decoders.Sequence(chain))


MAKERS: dict[str, Callable[[], Any]] = {
    "byte level": lambda: load_tokenizer(TINY_MOE),
    "metaspace": lambda: word_level(WORDS, decoders.Metaspace()),
    "metaspace, never stripped": lambda: word_level(WORDS, decoders.Metaspace(prepend_scheme="never")),
    "byte fallback": llama_like,
    "word piece": lambda: word_level(["the", "##s", "a", ".", "##ing", "'", "do"], decoders.WordPiece()),
    "suffix": lambda: word_level(["th", "e</w>", "a</w>", "."], decoders.BPEDecoder()),
    "no decoder": lambda: word_level(["th", "e", "a"], None),
}


class Tokenizers(dict[str, Any]):
    """Printed shortly where a property fails."""

    def __repr__(self) -> str:
        return "..."


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return Tokenizers({name: make() for name, make in MAKERS.items()})


@pytest.fixture(scope="module")
def tiny(tokenizers: Tokenizers) -> Any:
    return tokenizers["byte level"]


def reference(tokenizer: Any, ids: list[int], *, skip: bool = True) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


@st.composite
def pieces(draw: st.DrawFn, size: int) -> list[list[int]]:
    """Token ids below `size`, and some beyond the vocabulary, in the pieces that pushes bring."""
    token = st.integers(0, size + 2)
    return draw(st.lists(st.lists(token, max_size=4), max_size=20))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "byte fallback"])
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(tokenizers: Tokenizers, name: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[name]
    skip = data.draw(st.booleans())
    pushes = data.draw(pieces(len(tokenizer)))
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    parts = [stream.push(push) for push in pushes]
    parts.append(stream.push([], finished=True))
    ids = [token for push in pushes for token in push]
    assert "".join(parts) == stream.text == reference(tokenizer, ids, skip=skip)
    assert stream.num_tokens == len(ids)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "byte fallback"])
@given(data=st.data())
def test_an_output_goes_on_from_its_prompt(tokenizers: Tokenizers, name: str, data: st.DataObject) -> None:
    """Prompt and output make the text of all tokens, so the first output token keeps its space."""
    tokenizer = tokenizers[name]
    skip = data.draw(st.booleans())
    token = st.integers(0, len(tokenizer) + 2)
    prompt, ids = data.draw(st.lists(token, max_size=9)), data.draw(st.lists(token, max_size=9))
    before, whole = reference(tokenizer, prompt, skip=skip), reference(tokenizer, prompt + ids, skip=skip)
    assume(whole.startswith(before) and not before.endswith("�"))
    assert streamed(tokenizer, prompt, ids, skip_special_tokens=skip) == whole[len(before) :]


def streamed(tokenizer: Any, prompt: list[int], ids: list[int], **options: Any) -> str:
    stream = TextStream(tokenizer, prompt=prompt, **options)
    return "".join([*(stream.push([token]) for token in ids), stream.push([], finished=True)])


@pytest.mark.parametrize("name", ["metaspace", "byte fallback"])
def test_the_first_token_keeps_its_space(tokenizers: Tokenizers, name: str) -> None:
    tokenizer = tokenizers[name]
    the, a, end = tokenizer.convert_tokens_to_ids(["▁the", "▁a", "</s>"])
    assert streamed(tokenizer, [the], [a, the]) == " a the"
    assert streamed(tokenizer, [the, *[end] * 9], [a]) == " a"
    assert streamed(tokenizer, [end], [a]) == streamed(tokenizer, [], [a]) == "a"  # nothing is before it
    assert streamed(tokenizer, [end], [a], skip_special_tokens=False) == " a"
    assert streamed(tokenizer, [the, len(tokenizer) + 5, -1, 2**70], [a]) == " a"
    stream = TextStream(tokenizer, prompt=[the], stop=[" a"])
    assert (stream.push([a]), stream.stopped) == ("", " a")


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_character_that_the_prompt_began(tokenizers: Tokenizers, name: str) -> None:
    """It is completed, or its replacement was the prompt's."""
    tokenizer = tokenizers[name]
    spelled = [f"<0x{byte:02X}>" for byte in "🎉".encode()]
    ids = tokenizer.convert_tokens_to_ids(spelled) if name == "byte fallback" else tokenizer.encode("🎉")
    the = tokenizer.convert_tokens_to_ids("the") if name == "byte fallback" else tokenizer.encode("the")[0]
    for place in range(1, len(ids)):
        assert streamed(tokenizer, ids[:place], ids[place:]) == "🎉"
        assert streamed(tokenizer, ids[:place], [the]).endswith("the")
        assert "�" not in streamed(tokenizer, ids[:place], [the]) + streamed(tokenizer, ids[:place], [])


@given(st.lists(st.one_of(st.sampled_from(WORDS), st.characters(exclude_categories=["Cs"])), max_size=20))
def test_byte_tokens_make_characters(tokenizers: Tokenizers, parts: list[str]) -> None:
    tokenizer = tokenizers["byte fallback"]
    ids: list[int] = []
    for part in parts:
        spelled = [part] if part in WORDS else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += tokenizer.convert_tokens_to_ids(spelled)
    if ids and ids[0] == tokenizer.convert_tokens_to_ids("<0x20>"):
        ids = ids[1:]  # `decode` strips a leading space that is a byte token; no tokenizer makes one
    stream = TextStream(tokenizer)
    given_out = [stream.push([token]) for token in ids]
    assert "".join(given_out) + stream.push([], finished=True) == reference(tokenizer, ids)


def test_byte_tokens_are_not_held_back(tokenizers: Tokenizers) -> None:
    """A new line is a byte token in Llama 2: it must end the text at once, not with the token after it."""
    tokenizer = tokenizers["byte fallback"]
    newline, broken, the = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xE4>", "▁the"])
    stream = TextStream(tokenizer, stop=["\n"])
    assert (stream.push([the]), stream.push([newline]), stream.stopped) == ("the", "", "\n")
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in (newline, broken, the)] == ["\n", "", "� the"]


def test_characters_are_whole(tiny: Any) -> None:
    text = "Zoë 🎉 漢字"
    ids = tiny.encode(text)
    stream = TextStream(tiny)
    parts = [stream.push([token]) for token in ids]
    assert len(ids) > len(text)
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)


def test_an_incomplete_character_comes_at_the_end(tiny: Any) -> None:
    ids = tiny.encode("a🎉")[:-1]
    stream = TextStream(tiny)
    assert stream.push(ids) == "a"
    assert stream.push([], finished=True) == "�"


def test_text_is_held_back_only_as_long_as_needed(tiny: Any) -> None:
    stream = TextStream(tiny, stop=["abc", "bd"])
    assert [stream.push(tiny.encode(character)) for character in "xabxabd"] == ["x", "", "", "abx", "", "", "a"]
    assert (stream.stopped, stream.num_tokens, stream.text) == ("bd", 7, "xabxa")
    assert stream.push(tiny.encode("x"), finished=True) == ""
    assert stream.num_tokens == 7


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abx")])
def test_the_stop_token_is_counted_and_not_shown(tiny: Any, include: bool, text: str) -> None:
    ids = [tiny.encode(character)[0] for character in "abx"]
    stream = TextStream(tiny, include_stop_str_in_output=include)
    output = RequestOutput("r", ids, finish_reason=FinishReason.STOP, stop_token=ids[-1])
    assert stream.take(output) == text
    assert stream.num_tokens == 3


@given(data=st.data())
def test_pieces_join_to_the_text(tokenizers: Tokenizers, data: st.DataObject) -> None:
    """Bytes of single tokens, as log-probabilities show them, are those of the text."""
    for name in ("byte level", "metaspace, never stripped"):
        tokenizer = tokenizers[name]
        ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
        joined = b"".join(Vocabulary.of(tokenizer).piece(token) for token in ids)
        assert joined.decode(errors="replace") == reference(tokenizer, ids, skip=False)


def test_a_piece_keeps_its_space(tokenizers: Tokenizers) -> None:
    for name in ("metaspace", "byte fallback"):
        tokenizer = tokenizers[name]
        assert Vocabulary.of(tokenizer).piece(tokenizer.convert_tokens_to_ids("▁the")) == b" the"


def test_the_vocabulary_is_made_once(tiny: Any) -> None:
    assert Vocabulary.of(tiny) is Vocabulary.of(tiny)
    assert Detokenizer(Vocabulary.of(tiny)).decode(tiny.encode("a")[0]) == "a"


@pytest.mark.parametrize(
    ("template", "why"),
    [("{% if %}", "line 1"), ("{{ messages[0].content | no_such }}", "no_such"), ("{{ messages[0].a.b }}", "'a'")],
)
def test_a_broken_chat_template_is_found(template: str, why: str) -> None:
    tokenizer = load_tokenizer(TINY_MOE)
    check_chat_template(tokenizer, TINY_MOE)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=why):
        check_chat_template(tokenizer, TINY_MOE)
    for fine in ("{{ raise_exception('a system prompt is needed') }}", None):
        tokenizer.chat_template = fine
        check_chat_template(tokenizer, TINY_MOE)


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        load_tokenizer(tmp_path / "missing")


def test_a_decoder_over_the_whole_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="CTC"):
        Vocabulary.of(word_level(WORDS, decoders.CTC()))


TEXT = "tokenizer.json"
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_ONLY_ADDED = json.dumps({**json.loads((TINY_MOE / TEXT).read_text()), "model": _NO_MODEL}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MOE, tmp_path / "model"))


FAULTS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no tokenizer": ({TEXT: None}, "tokenizer"),
    "nothing of one": ({TEXT: None, "tokenizer_config.json": None}, "tokenizer"),
    "only added tokens": ({TEXT: _ONLY_ADDED}, "only added tokens"),
    "cut off": ({TEXT: b'{"a"'}, "tokenizer.json is not a tokenizer that can be read"),
    "no specification": ({TEXT: b'{"version":"1.0"}'}, "tokenizer.json is not a tokenizer that can be read"),
    "no text": ({TEXT: b"\xff\xfe"}, "tokenizer.json is not a tokenizer that can be read"),
}


def spoil(folder: Path, fault: str) -> str:
    """Write the fault's files, or remove them; what is said then."""
    files, message = FAULTS[fault]
    for name, content in files.items():
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
    return message


@pytest.mark.parametrize("words", [("serve",), ("generate", "--prompt", "x"), ("trace", "--prompt", "x")])
@pytest.mark.parametrize("fault", FAULTS)
def test_commands_refuse_it_when_settings_are_read(
    folder: Path, fault: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    message = spoil(folder, fault)
    command, *more = words
    assert main([command, str(folder), "--print-config", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(folder) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_llm_refuses_it_before_weights_travel(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = spoil(folder, fault)
    monkeypatch.setattr(serving.offline.opening, "fetch_checkpoints", lambda _: pytest.fail("weights were asked for"))
    with pytest.raises(ConfigError, match=message if "read" not in message else "tokenizer"):
        LLM(folder, device="cpu")


def test_a_server_needs_text_and_other_machines_do_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder, "nothing of one")
    nodes = ("--nnodes", "2", "--node-rank", "1", "--data-parallel-size", "2", "--enable-expert-parallel")
    where = ("--master-addr", "127.0.0.1", "--master-port", "4000", "--device", "cpu")
    assert main(["serve", str(folder), *nodes, *where, "--print-config"]) == 0


def test_llm_without_a_tokenizer_needs_none(folder: Path) -> None:
    spoil(folder, "nothing of one")
    with LLM(folder, skip_tokenizer_init=True, device="cpu", kv_cache_memory="4M", max_num_seqs=1) as llm:
        assert llm.generate([1, 2, 3], use_tqdm=False)[0].outputs[0].token_ids


def test_slow_vocabularies_are_tokenizers_too(folder: Path) -> None:
    """`vocab.json` and `merges.txt`, which transformers makes the same tokenizer of."""
    wanted = load_tokenizer(TINY_MOE)
    spec = json.loads((folder / TEXT).read_text())["model"]
    (folder / TEXT).unlink()
    (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(folder).encode("def main") == wanted.encode("def main")


@pytest.mark.parametrize("name", ["enable_dbo", "enable_two_batch_overlap"])
def test_llm_takes_either_name_of_overlap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.llm, "make_offline_engine", lambda options: Mock())
    llm = LLM(TINY_MOE, skip_tokenizer_init=True, device="cpu", **{name: True})
    assert llm.options.dbo.enable_dbo
    with pytest.raises(ConfigError, match="one setting with two values"):
        LLM(TINY_MOE, enable_dbo=False, enable_two_batch_overlap=True)
