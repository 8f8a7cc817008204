"""A tokenizer as llguidance needs it: the bytes of every token, as a tree, and which tokens end an output.

It takes a second for a vocabulary of 150,000 tokens, in which the library holds Python's lock: steps wait, whichever
thread makes it. So it is made once per process, for the first request that needs it, and not at each start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from model_runner import RequestError
from serving.text.tokenizer import TOKENIZER, load_tokenizer, read_tokenizer
from ubatch import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_known: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], LLTokenizer]] = WeakKeyDictionary()


def grammar_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer for grammars; made once per tokenizer.

    Args:
        vocab_size: of the model; tokens that the tokenizer does not know are never allowed.
        eos_token_ids: the model's tokens that end an output, at least one.

    Raises:
        RequestError: the tokenizer is not a fast one, the model has no end-of-sequence token, or llguidance is not
            installed.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            f"structured outputs need a tokenizer with a {TOKENIZER}; this model's is a {type(tokenizer).__name__}. "
            f"Convert it, or leave structured outputs out."
        )
    known, key = _known.setdefault(tokenizer, {}), (vocab_size, tuple(eos_token_ids))
    if key not in known:
        known[key] = _make(backend, *key)
    return known[key]


def load_grammar_tokenizer(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The same for a checkpoint, without `transformers`, whose import takes seconds, if it has a `tokenizer.json`.

    Raises:
        RequestError: see `grammar_tokenizer`; or the checkpoint has no tokenizer that can be loaded.
    """
    try:
        if (model / TOKENIZER).is_file():
            return _make(_with_added_tokens(read_tokenizer(model / TOKENIZER), model), vocab_size, tuple(eos_token_ids))
        return grammar_tokenizer(load_tokenizer(model), vocab_size, eos_token_ids)
    except ConfigError as error:
        raise RequestError(f"structured outputs need the model's tokenizer: {error}") from error


def words_of(tokenizer: LLTokenizer) -> int:
    """Length of a mask, in 32-bit words."""
    return -(-tokenizer.vocab_size // 32)


def _with_added_tokens(tokenizer: Tokenizer, model: Path) -> Tokenizer:
    """The tokenizer with the tokens that only `tokenizer_config.json` adds, as transformers reads it."""
    from tokenizers import AddedToken

    try:
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return tokenizer
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    for number, token in sorted((added or {}).items(), key=lambda item: int(item[0])):
        content = token["content"]
        if tokenizer.token_to_id(content) is None and int(number) == tokenizer.get_vocab_size(with_added_tokens=True):
            tokenizer.add_tokens([AddedToken(content, special=bool(token.get("special")), normalized=False)])
    return tokenizer


def _make(backend: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    if not eos_token_ids:
        raise RequestError("structured outputs need an end-of-sequence token, which this model's config does not name.")
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise RequestError(
            f"structured outputs need llguidance, which this server does not have ({error}): pip install llguidance."
        ) from error
    text = backend.to_str()
    if backend.padding is not None or backend.truncation is not None:
        text = json.dumps({**json.loads(text), "padding": None, "truncation": None})
    size = max(vocab_size, _num_ids(backend))
    try:
        return LLTokenizer(text, n_vocab=size, eos_token=list(eos_token_ids))
    except (ValueError, RuntimeError) as error:
        raise RequestError(f"structured outputs cannot use this model's tokenizer: {error}") from error


def _num_ids(backend: Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
