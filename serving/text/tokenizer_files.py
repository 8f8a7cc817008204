"""Reads a checkpoint's tokenizer files without `transformers`, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ubatch import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TOKENIZER", "find_vocabulary", "no_vocabulary", "read_tokenizer"]

TOKENIZER = "tokenizer.json"
_SLOW = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
"""Files of slow tokenizers, which `transformers` converts."""


def find_vocabulary(model: Path) -> Path:
    """The vocabulary file of a checkpoint's tokenizer. Without one, `transformers` would make an empty tokenizer."""
    for pattern in (TOKENIZER, *_SLOW):
        for file in sorted(model.glob(pattern)):
            if file.is_file():
                return file
    raise ConfigError(
        f"{model} has no tokenizer: neither {TOKENIZER} nor another vocabulary ({', '.join(_SLOW)}). Put the model's "
        f"{TOKENIZER} and tokenizer_config.json there."
    )


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
        raise no_vocabulary(file)
    return tokenizer


def no_vocabulary(where: Path) -> ConfigError:
    """The error for a tokenizer with an empty vocabulary, which would turn every text into no tokens."""
    return ConfigError(
        f"{where}: its vocabulary is empty, or has only added tokens, so that text would give no tokens. Put the "
        f"model's own {TOKENIZER} there."
    )
