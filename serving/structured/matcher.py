"""Grammars in an engine: made in a thread, one state per request, masks of all requests of a step at once.

    begin      a grammar is compiled from its text, in a thread; texts that came before are known
    maker      gives every request a copy of the compiled grammar, which has taken in nothing
    advance    the output's new tokens, in the order of the steps
    fill       the masks of a step, by llguidance's own threads, without Python's lock

Equal texts give equal masks, whatever came before, so an output is a function of its request alone. The limits of a
step's work (`limits`) are counted, not timed: all ranks of a tensor-parallel group reach them at the same token.

The tokenizer is as llguidance needs it: the bytes of every token, as a tree, and which tokens end an output. It takes a
second for a vocabulary of 150,000 tokens, in which the library holds Python's lock: steps wait, whichever thread makes
it. So it is made once per process, for the first request that needs it, and not at each start.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model_runner import GrammarRows, RequestError, TokenGrammar
from serving.structured.limits import limits
from serving.text.tokenizer import TOKENIZER, load_tokenizer, read_tokenizer, tokenizer_config
from ubatch import ConfigError
from ubatch.process import num_cores

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MAX_KNOWN = 256
"""Most compiled grammars that an engine keeps."""
MAX_KNOWN_LENGTH = 2**24
"""Most characters of the texts of all that it keeps."""
MAX_KNOWN_S = 4.0
"""Most processor time, in seconds, of the compilations of all that it keeps: a second makes up to some 200 MiB."""
_THREADS = 2
_MANY = 8
"""With fewer masks, or two cores, llguidance's threads cost more than they save: a mask takes some microseconds."""


class Matcher:
    """The state of one request's grammar; see `model_runner.TokenGrammar`.

    Args:
        matcher: only this request's.
        masks: of all requests of the engine.
    """

    def __init__(self, matcher: LLMatcher, masks: Masks) -> None:
        self.matcher, self.masks = matcher, masks
        self.num_tokens = 0
        self.failure = ""

    def advance(self, tokens: Sequence[int]) -> None:
        """See `TokenGrammar`."""
        count = len(tokens)
        self.num_tokens += count
        taken = self.matcher.try_consume_tokens(list(tokens))
        if taken < count and not self.failure:
            self.failure = self.matcher.get_error() or f"token {tokens[taken]} is not allowed here"

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """See `TokenGrammar`."""
        return self.matcher.validate_tokens(list(tokens))

    def look_for_failure(self) -> str:
        """`failure`, after a mask was made: a limit was reached, or no token of the vocabulary may come next."""
        matcher = self.matcher
        if not self.failure and matcher.is_stopped() and (matcher.is_error() or not matcher.is_accepting()):
            self.failure = matcher.get_error() or f"no token of the vocabulary may come next ({matcher.stop_reason()})"
        return self.failure


class Masks:
    """Fills the masks of an engine's requests; see `model_runner.MaskFiller`."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.words = words_of(tokenizer)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()

    def fill(self, requests: Sequence[GrammarRows], masks: Tensor) -> None:
        """See `MaskFiller`."""
        roots: list[tuple[LLMatcher, int]] = []
        chains: list[tuple[LLMatcher, int, list[int]]] = []
        for request in requests:
            matcher = cast(Matcher, request.grammar).matcher
            if not request.drafts:
                roots.append((matcher, request.first))
            elif request.parents in (None, tuple(range(len(request.drafts)))):
                chains.append((matcher, request.first, list(request.drafts)))
            else:
                self._fill_tree(matcher, request, masks)
        if len(roots) >= _MANY and num_cores() > 2:
            self._executor.unsafe_compute_mask_ptr(roots, *self._memory(masks))
        else:
            address, size, _ = self._memory(masks)
            for matcher, row in roots:
                matcher.unsafe_compute_mask_ptr(address + row * size, size)
        if chains:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(chains, *self._memory(masks))
        for request in requests:
            if cast(Matcher, request.grammar).look_for_failure():
                masks[request.first : request.first + 1 + len(request.drafts)] = 0

    def _fill_tree(self, matcher: LLMatcher, request: GrammarRows, masks: Tensor) -> None:
        """The masks of a tree: one chain from the root to each leaf, with a copy of the matcher."""
        nodes = range(1, 1 + len(request.drafts))
        paths = [path_of(leaf, request.parents or ()) for leaf in nodes if leaf not in (request.parents or ())]
        starts = list(accumulate((1 + len(path) for path in paths), initial=0))
        scratch = torch.zeros(starts[-1], self.words, dtype=torch.int32)
        chains = [
            (matcher.deep_copy(), start, [request.drafts[node - 1] for node in path])
            for start, path in zip(starts, paths, strict=False)
        ]
        self._executor.unsafe_compute_mask_ptr_with_draft_token(chains, *self._memory(scratch))
        rows = {
            node: start + depth
            for start, path in zip(starts, paths, strict=False)
            for depth, node in enumerate((0, *path))
        }
        masks[[request.first + node for node in rows]] = scratch[list(rows.values())]

    def _memory(self, masks: Tensor) -> tuple[int, int, int]:
        """Address, bytes of a row, and rows: what llguidance writes to."""
        return masks.data_ptr(), self.words * masks.element_size(), len(masks)


def path_of(node: int, parents: Sequence[int]) -> tuple[int, ...]:
    """The nodes from the root, which is left out, to this one."""
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = parents[node - 1]
    return tuple(path)


@dataclass(frozen=True)
class _Compiled:
    """A compiled grammar, which makes those of requests.

    Attributes:
        seconds: processor time that its compilation took.
    """

    matcher: LLMatcher
    masks: Masks
    seconds: float

    def __call__(self) -> TokenGrammar:
        return Matcher(self.matcher.deep_copy(), self.masks)


class GrammarCompiler:
    """Makes the grammars of an engine; see `serving.engine.rank.core.Grammars`. It starts no thread before the first.

    Args:
        load: loads the tokenizer, in the thread of the first grammar; raises RequestError if there is none that fits.
    """

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load, self._loading = load, Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars")
        self._made: tuple[LLTokenizer, Masks] | None = None
        self._known: OrderedDict[str, Future[Callable[[], TokenGrammar]]] = OrderedDict()

    def begin(self, text: str) -> Future[Callable[[], TokenGrammar]]:
        """See `Grammars`."""
        known = self._known.get(text)
        if known is None or (known.done() and known.exception() is not None):
            known = self._known[text] = self._threads.submit(self._compile, text)
            self._known.move_to_end(text)
            self._forget()
        else:
            self._known.move_to_end(text)
        return known

    def close(self) -> None:
        """See `Grammars`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Give up those that were used least recently, if all together are too many or too large."""
        length = seconds = 0.0
        for number, (text, known) in enumerate(reversed(list(self._known.items()))):
            length += len(text)
            if known.done() and known.exception() is None:
                seconds += cast(_Compiled, known.result()).seconds
            if number and (number >= MAX_KNOWN or length > MAX_KNOWN_LENGTH or seconds > MAX_KNOWN_S):
                del self._known[text]

    def _compile(self, text: str) -> Callable[[], TokenGrammar]:
        from llguidance import LLMatcher

        with self._loading:
            if self._made is None:
                tokenizer = self._load()
                self._made = tokenizer, Masks(tokenizer)
            tokenizer, masks = self._made
        begun = time.thread_time()
        compiled = LLMatcher(tokenizer, text, log_level=0, limits=limits())
        if not compiled.is_error():
            compiled.compute_bitmask()  # the copies need not find the first tokens' states again
        if failure := Matcher(compiled, masks).look_for_failure():
            raise RequestError(f"the grammar of the structured output cannot be used: {failure}", param="grammar")
        return _Compiled(compiled, masks, time.thread_time() - begun)


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

    added = tokenizer_config(model).get("added_tokens_decoder") or {}
    for number, token in sorted(added.items(), key=lambda item: int(item[0])):
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
