"""Loads a checkpoint's tokenizer, tries its chat template, and gives the bytes of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from serving.text.chat_template import ChatTemplate
from ubatch import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TOKENIZER = "tokenizer.json"
_SLOW = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
"""Files of slow tokenizers, which `transformers` converts."""
MAX_TOKENS = 2**32  # `tokenizers` fails on ids from here on
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders that work token by token, given the tokens before. Others need the whole text (CTC drops repetitions).
STREAMABLE = {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


def load_tokenizer(model: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with its chat template, or this one.

    Code of a checkpoint is never run: if it has a tokenizer class of its own (`auto_map`), `tokenizer.json` is used.

    Raises:
        ConfigError: the folder has no tokenizer, or one whose text cannot be streamed.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # two seconds

    if not model.is_dir():
        raise ConfigError(f"{model} is not a folder. `model` must be the folder of a checkpoint with its tokenizer.")
    own_class = bool(tokenizer_config(model).get("auto_map"))  # it brings code for its tokenizer
    if own_class and not (model / TOKENIZER).is_file():
        raise ConfigError(f"{model}: its tokenizer is code, which is never run. Put a tokenizer.json there.")
    if not any(file.is_file() for pattern in (TOKENIZER, *_SLOW) for file in model.glob(pattern)):
        # `transformers` would make an empty tokenizer
        raise ConfigError(
            f"{model} has no tokenizer: neither {TOKENIZER} nor another vocabulary ({', '.join(_SLOW)}). Put the "
            f"model's {TOKENIZER} and tokenizer_config.json there."
        )
    kind = PreTrainedTokenizerFast if own_class else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # broken files raise errors of many kinds
        raise ConfigError(
            f"{model} has no tokenizer that transformers can load ({error}). Put the model's tokenizer.json and "
            f"tokenizer_config.json there."
        ) from error
    if not Vocabulary.of(tokenizer).size:
        raise _no_vocabulary(model)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.model_max_length = 1 << 40  # the engine checks lengths; the tokenizer would only warn
    return tokenizer


def check_tokenizer(model: Path) -> None:
    """Find early, from the files alone, most faults that `load_tokenizer` would report; run before weights are loaded.

    Raises:
        ConfigError: the folder has no tokenizer, or a broken or empty one.
    """
    if (model / TOKENIZER).is_file():
        read_tokenizer(model / TOKENIZER)
    else:
        load_tokenizer(model)


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(
            f"{file} is not a tokenizer that can be read ({error}). Put the model's own {TOKENIZER} there."
        ) from error
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise _no_vocabulary(file)
    return tokenizer


def _no_vocabulary(where: Path) -> ConfigError:
    """The error for a tokenizer with an empty vocabulary, which would turn every text into no tokens."""
    return ConfigError(
        f"{where}: its vocabulary is empty, or has only added tokens, so that text would give no tokens. Put the "
        f"model's own {TOKENIZER} there."
    )


def tokenizer_config(model: Path) -> dict[str, Any]:
    """A checkpoint's `tokenizer_config.json`; empty if there is none, or a broken one, which transformers reports."""
    try:
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def check_chat_template(tokenizer: PreTrainedTokenizerBase, model: Path | str) -> ChatTemplate | None:
    """Try the chat template, if there is one, on a message of a user, whose words must come out.

    A template may refuse that message by itself; this is no fault. `model` is where it comes from, for the messages.

    Returns:
        The template; None if the tokenizer has none.

    Raises:
        ConfigError: the template is broken, or leaves out what a user says.
    """
    template = ChatTemplate.of(tokenizer)
    if template is None:
        return None
    template.forms.find_all()
    told = template.content_form("user").told
    if told:
        return template
    if told is False:
        raise ConfigError(
            f"the chat template of {model} leaves out what a user says, whether a message's content is a string or a "
            "list of parts. Correct it, or remove it."
        )
    try:
        template.write([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except Exception as error:  # a template can raise errors of any kind
        if type(error) is not TemplateError:  # its own raise_exception; what jinja2 raises is a subclass
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            reason = line + " ".join(str(error).split())
            raise ConfigError(
                f"the chat template of {model} is broken ({reason}). Correct it, or remove it."
            ) from error
    return template


class Vocabulary:
    """The bytes or text of single tokens. One per tokenizer: `Vocabulary.of(tokenizer)`.

    Attributes:
        all_bytes: every token is a sequence of bytes, independent of the tokens before.

    Raises:
        ConfigError: the tokenizer is not a `tokenizers` one, or decodes in a way that cannot be streamed.
    """

    _known: ClassVar[WeakKeyDictionary[Any, Vocabulary]] = WeakKeyDictionary()

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{type(tokenizer).__name__} has no tokenizer.json behind it, which text is made with.")
        spec = json.loads(backend.to_str())["decoder"]
        kinds = [part["type"] for part in spec.get("decoders", [spec])] if spec else []
        self.all_bytes = kinds == ["ByteLevel"]
        self._byte_tokens = "ByteFallback" in kinds
        if not self.all_bytes and (unknown := set(kinds) - STREAMABLE):
            raise ConfigError(f"the tokenizer's decoder {', '.join(sorted(unknown))} cannot decode token by token.")
        self._backend = backend
        self._special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
        self._byte_of = {character: byte for byte, character in _byte_level_characters().items()}
        self._bytes: dict[int, bytes | None] = {}
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """The tokenizer's vocabulary, made once."""
        known = cls._known.get(tokenizer)
        if known is None:
            known = cls._known[tokenizer] = cls(tokenizer)
        return known

    @property
    def size(self) -> int:
        """Number of tokens, without added tokens."""
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    @cached_property
    def longest(self) -> int:
        """Upper bound of a token's characters: the longest entry's length, in bytes if the vocabulary has bytes."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def is_special(self, token: int) -> bool:
        """Whether the tokenizer marks the token as special (end of text, begin of a turn)."""
        return token in self._special

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text; None if there is none."""
        token: int | None = self._backend.token_to_id(text)
        return token if token is not None and self.is_special(token) else None

    def raw(self, token: int) -> bytes | None:
        """The bytes of a byte token, perhaps only part of a character; None for a text token.

        An unknown token (models have spare embedding rows) gives b"".
        """
        try:
            return self._bytes[token]
        except KeyError:
            known = 0 <= token < MAX_TOKENS
            return self._bytes.setdefault(token, self._find_bytes(self._backend.id_to_token(token) if known else None))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of known tokens, special tokens included."""
        return self._backend.decode(tokens, skip_special_tokens=False)

    def piece(self, token: int) -> bytes:
        """The UTF-8 bytes that the token adds to a text, a leading space included; perhaps only part of a character."""
        known = self._pieces.get(token)
        if known is None:
            known = self.raw(token)
            if known is None:
                known = self.decode([token, token])[len(self.decode([token])) :].encode()
            self._pieces[token] = known
        return known

    def _find_bytes(self, text: str | None) -> bytes | None:
        if text is None:
            return b""
        if self.all_bytes:
            if all(character in self._byte_of for character in text):
                return bytes(self._byte_of[character] for character in text)
            return text.encode()
        if self._byte_tokens and (match := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return None


def _byte_level_characters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
