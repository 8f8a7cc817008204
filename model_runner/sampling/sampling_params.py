"""How to generate for one request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.sampling.token_ids import TokenIds, short_repr
from ubatch.errors import shown
from ubatch.streams import to_device

MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS = 1024, 128
"""Most entries of a request; vLLM's limits."""
MAX_BAD_SEQUENCES, MAX_BAD_TOKENS = 256, 4096
"""Most token sequences of a request, and tokens of all of them: every step checks them."""
MAX_GRAMMAR_LENGTH = 2**20
"""Most characters of a grammar."""
_GREEDY_BELOW = 1e-5
MAX_TOP_LOGPROBS = 1024
"""Most likely tokens that a request may ask for at each position; a server allows fewer (`--max-logprobs`)."""
_MAX_BIAS = 100.0
_TYPES = {int: "an integer", float: "a number", bool: "True or False"}
_Rule = tuple[type, str, Callable[[Any], bool]]
_PENALTY: _Rule = (float, "from -2 to 2", lambda value: -2 <= value <= 2)
_LOGPROBS: _Rule = (int, f"from 0 to {MAX_TOP_LOGPROBS}", lambda value: 0 <= value <= MAX_TOP_LOGPROBS)
_RULES: dict[str, _Rule] = {
    "temperature": (float, "0 (greedy) or positive", lambda value: 0 <= value < math.inf),
    "top_k": (int, "at least 1, or 0 or -1 for all tokens", lambda value: -1 <= value < 2**63),
    "top_p": (float, "above 0 and at most 1", lambda value: 0 < value <= 1),
    "seed": (int, "within 64 bits", lambda value: -(2**63) <= value < 2**64),
    "max_tokens": (int, "at least 1", lambda value: 1 <= value < 2**63),
    "ignore_eos": (bool, "", lambda value: True),
    "min_p": (float, "from 0 to 1", lambda value: 0 <= value <= 1),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (float, "positive (1 is none)", lambda value: 0 < value < math.inf),
    "min_tokens": (int, "0 or more", lambda value: value >= 0),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
_TOKEN: _Rule = (int, "0 or more", lambda value: 0 <= value < 2**63)
_MOST_TOKENS = 2**20
"""More tokens than any vocabulary has."""
_BIAS: _Rule = (float, "from -100 to 100", lambda value: -_MAX_BIAS <= value <= _MAX_BIAS)

if TYPE_CHECKING:
    AllowedTokens: TypeAlias = Sequence[int]
else:
    AllowedTokens = TokenIds  # the type after `__post_init__`, for msgspec


class BadSequences:
    """Token sequences, none of them empty, indexed by their tokens before the last one; a look-up costs one step per
    different length.

    Attributes:
        single: tokens that are a sequence by themselves, so they are always forbidden.
        reach: number of last output tokens that a look-up needs.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.single = tuple(sequence[0] for sequence in sequences if len(sequence) == 1)
        self._last_of: dict[tuple[int, ...], list[int]] = {}
        for *before, last in sequences:
            if before:
                self._last_of.setdefault(tuple(before), []).append(last)
        self._lengths = sorted(set(map(len, self._last_of)))
        self.reach = self._lengths[-1] if self._lengths else 0

    def completing(self, output: Sequence[int]) -> list[int]:
        """Tokens that, after this output (or its last `reach` tokens), would complete a sequence of several tokens."""
        tails = (tuple(output[-length:]) for length in self._lengths if length <= len(output))
        return [last for tail in tails for last in self._last_of.get(tail, ())]


@dataclass(frozen=True)
class SamplingParams:
    """How to generate for one request. Names and meanings are vLLM's; the default is greedy.

    They are applied in vLLM's order: allowed tokens, bad sequences, `min_tokens`, bias, penalties, temperature, min-p,
    top-k, top-p. A request whose parameters allow no token is refused, or ends with an error if that shows later.

    Numpy numbers and 0-dimensional torch tensors of the right kind are converted to Python's. An integer is accepted as
    a number; a bool is neither.

    Attributes:
        temperature: below 1e-5 greedy; 1 samples from the model's distribution.
        top_k: sample from the k most likely tokens only; 0 or -1 from all.
        top_p: sample from the smallest set of most likely tokens that together have this probability; 1 from all.
        seed: makes sampling repeatable, 64 bits with or without a sign; None is a fresh seed per request.
        max_tokens: most tokens to generate.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens; 128 at most.
        ignore_eos: go on after the model's end-of-sequence tokens.
        min_p: leave out tokens less likely than this share of the most likely one, 0 to 1.
        presence_penalty: subtracted from the logit of every token that is in the output already, -2 to 2.
        frequency_penalty: subtracted once per occurrence of the token in the output, -2 to 2.
        repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies negative ones.
        logit_bias: pairs (token, number added to its logit, -100 to 100), or a mapping; 1024 at most. If a token
            repeats, the last pair is used.
        min_tokens: before this number of tokens, stop tokens and end-of-sequence tokens (ignored ones, too) are
            forbidden.
        logprobs: report log-probabilities of the chosen token and of this number of most likely ones, 0 to 1024.
        prompt_logprobs: the same for the prompt's tokens.
        allowed_token_ids: only these tokens are allowed, at least one; None allows all. It becomes a `TokenIds`, which
            reads like a tuple.
        bad_token_sequences: sequences that the output must not contain: the token that would complete one is forbidden.
            The prompt does not count. 256 at most, with 4096 tokens in all. They are vLLM's `bad_words` as tokens
            (made by `serving.text.words`).
        grammar: text of a grammar (llguidance's notation, see `serving.structured`) that the output obeys. An output
            that has nothing left to say ends with an end-of-sequence token, with `ignore_eos`, too. What runs steps
            must make the grammar of each request from it; `model_runner.generate` does not.

    Raises:
        RequestError: at construction, if a value has a wrong type or is out of range, or values contradict each other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _checked(name, value, rule))
        if self.min_tokens > self.max_tokens:
            message = f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens}."
            raise RequestError(message, param="min_tokens")
        entries = _entries("stop_token_ids", self.stop_token_ids, "token ids", MAX_STOP_TOKEN_IDS)
        stops = [_checked("a token of stop_token_ids", token, _TOKEN) for token in entries]
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(stops)))
        object.__setattr__(self, "logit_bias", tuple(self._checked_biases().items()))
        object.__setattr__(self, "bad_token_sequences", self._checked_sequences())
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _checked_set("allowed_token_ids", self.allowed_token_ids))
        if self.grammar is not None:
            _check_grammar(self.grammar)
        self.check_choice(())

    def _checked_biases(self) -> dict[int, float]:
        given: Any = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        biases = {}
        for entry in _entries("logit_bias", given, "pairs of a token and a number", MAX_LOGIT_BIASES):
            pair = _entries("an entry of logit_bias", entry, "a token and a number", 2)
            if len(pair) != 2:
                raise RequestError(f"an entry of logit_bias must be a token and a number, not {shown(entry)}.")
            token = _checked("a token of logit_bias", pair[0], _TOKEN)
            biases[token] = _checked(f"logit_bias of token {token}", pair[1], _BIAS)
        return biases

    def _checked_sequences(self) -> tuple[_Tokens, ...]:
        name, own = "bad_token_sequences", self.bad_token_sequences
        entries = _entries(name, own, "sequences of token ids", MAX_BAD_SEQUENCES)
        sequences = [_checked_tokens(f"a sequence of {name}", entry) for entry in entries]
        count = sum(map(len, sequences))
        if count > MAX_BAD_TOKENS:
            raise RequestError(f"{name} has {count} tokens in all; at most {MAX_BAD_TOKENS} are allowed.")
        return tuple(dict.fromkeys(sequences))

    def check_choice(self, eos_token_ids: Iterable[int]) -> None:
        """Refuse parameters that allow no first token, given the model's end-of-sequence tokens.

        Raises:
            RequestError: every allowed token is a bad sequence by itself, or would end the output before `min_tokens`.
        """
        if self.allowed_token_ids is None:
            return
        bad, early = set(self.bad_sequences.single), set(self.early_tokens(0, eos_token_ids))
        if len(self.allowed_token_ids) > len(bad) + len(early):
            return
        left = set(self.allowed_token_ids) - bad
        if left <= early:
            causes = ["is a bad one"] * (len(left) < len(self.allowed_token_ids))
            causes += [f"would end the output before min_tokens ({self.min_tokens})"] * bool(left)
            message = f"allowed_token_ids {self.allowed_token_ids} leaves no token: each {', or '.join(causes)}."
            raise RequestError(message, param="allowed_token_ids")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens outside the vocabulary.

        Raises:
            RequestError: a parameter has one.
        """
        for name, tokens in self.named_tokens():
            highest = max(tokens, default=0)
            if highest >= vocab_size:
                message = f"{name} has token {highest}; the vocabulary is 0 to {vocab_size - 1}."
                raise RequestError(message, param=name)

    def named_tokens(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Parameter name and its tokens, all 0 or more; of the allowed tokens (may be many) only the highest."""
        yield "logit_bias", [token for token, _ in self.logit_bias]
        yield "stop_token_ids", self.stop_token_ids
        yield "allowed_token_ids", () if self._allowed is None else (self._allowed.highest,)
        yield "bad_token_sequences", [token for sequence in self.bad_token_sequences for token in sequence]

    def ending_tokens(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The tokens that end the output, given the model's end-of-sequence tokens."""
        goes_on = self.ignore_eos and self.grammar is None  # nothing can follow a finished grammar
        return self.stop_token_ids if goes_on else (*self.stop_token_ids, *eos_token_ids)

    def early_tokens(self, index: int, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The tokens that `min_tokens` forbids at output index `index`: stop tokens and end-of-sequence tokens, as in
        vLLM even with `ignore_eos`."""
        return (*self.stop_token_ids, *eos_token_ids) if index < self.min_tokens else ()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature < _GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Whether top-k or top-p is in use."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def penalised(self) -> bool:
        """Whether a penalty is in use."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def needs_history(self) -> bool:
        """Whether sampling depends on earlier tokens, beyond the logits; the overlap loop then delays it."""
        return self.grammar is not None or self.looks_back

    @cached_property
    def looks_back(self) -> bool:
        """Whether the output so far changes logits, other than by a grammar, which keeps a state."""
        return self.penalised or self.min_tokens > 0 or self.bad_sequences.reach > 0

    @cached_property
    def masked(self) -> bool:
        """Whether some tokens are always forbidden; see `never_mask`."""
        return self.allowed_token_ids is not None or bool(self.bad_sequences.single)

    @cached_property
    def adjusts(self) -> bool:
        """Whether anything changes the logits before temperature."""
        return self.needs_history or self.masked or bool(self.logit_bias)

    @cached_property
    def only_obeys(self) -> bool:
        """Whether only the most likely token that the grammar allows is needed."""
        others = self.looks_back or self.masked or bool(self.logit_bias)
        return self.grammar is not None and self.greedy and not others

    @cached_property
    def plain(self) -> bool:
        """Whether only the argmax of the logits is needed: the fast path."""
        return self.greedy and not self.adjusts and self.logprobs is None and self.prompt_logprobs is None

    @cached_property
    def bias_tensors(self) -> tuple[Tensor, Tensor]:
        """The tokens of `logit_bias`, `[n]` int64, and their biases, `[n]` float32; on the host."""
        tokens, biases = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        return torch.tensor(tokens, dtype=torch.int64), torch.tensor(biases, dtype=torch.float32)

    @cached_property
    def bad_sequences(self) -> BadSequences:
        """`bad_token_sequences`, indexed for look-up."""
        return BadSequences(self.bad_token_sequences)

    def never_mask(self, vocab_size: int, device: torch.device) -> Tensor:
        """Mask of tokens that are always forbidden, `[vocab_size]` bool on the device; made once and cached.

        Raises:
            RequestError: a token is outside the vocabulary.
        """
        mask = self._masks.get((vocab_size, device))
        if mask is None:
            self.check_vocabulary(vocab_size)
            never = np.full(vocab_size, self._allowed is not None)
            if self._allowed is not None:
                never[self._allowed.ids] = False
            never[np.fromiter(self.bad_sequences.single, np.int64)] = True
            (there,) = to_device((torch.from_numpy(never),), device)
            mask = self._masks[vocab_size, device] = there.clone()  # an upload is valid for one step only
        return mask

    @property
    def _allowed(self) -> TokenIds | None:
        return cast("TokenIds | None", self.allowed_token_ids)

    @cached_property
    def _masks(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}


def _check_grammar(grammar: object) -> None:
    """Check type and size; whether the text is a grammar shows when its matcher is made."""
    if not isinstance(grammar, str) or not grammar:
        raise RequestError(f"grammar must be the text of a grammar, not {shown(grammar)}.", param="grammar")
    if len(grammar) > MAX_GRAMMAR_LENGTH:
        message = f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed."
        raise RequestError(message, param="grammar")


def _checked(name: str, value: object, rule: _Rule) -> Any:
    """The value as a Python number; raises if it has another type than the rule, or is out of its range."""
    kind, allowed, holds = rule
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        value = value.item()
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) is not (kind is bool):
        wanted = ", ".join(filter(None, (_TYPES[kind], allowed)))
        raise RequestError(f"{name} must be {wanted}, not {shown(value)} ({type(value).__name__}).")
    try:
        number = kind(value)
    except OverflowError:  # an integer beyond all floats
        number = math.nan
    if not holds(number):
        raise RequestError(f"{name} must be {allowed}, not {shown(value)}.")
    return number


def _checked_set(name: str, given: object) -> TokenIds:
    """Check and convert tokens, at least one; repeated ones count once. There may be as many as in a vocabulary."""
    if isinstance(given, TokenIds):
        return given
    tokens = _checked_tokens(name, given)
    ids = np.fromiter(tokens, np.int64)
    if (np.diff(ids) <= 0).any():
        ids = np.fromiter(dict.fromkeys(tokens), np.int64)
    return TokenIds(ids)


class _Tokens(tuple[int, ...]):
    """Checked tokens; a request with many outputs checks them only once. Logs show only the first 16."""

    __slots__ = ()

    def __repr__(self) -> str:
        return short_repr(self)


def _checked_tokens(name: str, given: object) -> _Tokens:
    """Check tokens, at least one."""
    if type(given) is _Tokens:
        return given
    tokens = _entries(name, given, "token ids", _MOST_TOKENS)
    if not tokens:
        raise RequestError(f"{name} is empty; give at least one token.")
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= 2**63:
        tokens = tuple(_checked(f"a token of {name}", token, _TOKEN) for token in tokens)
    return _Tokens(tokens)


def _entries(name: str, given: object, what: str, most: int) -> tuple[Any, ...]:
    """The given entries as a tuple."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be {what}, not {shown(given)}.")
    try:
        entries = tuple(given)
    except TypeError as error:  # a tensor without dimensions
        raise RequestError(f"{name} must be {what}, not {shown(given)}.") from error
    if len(entries) > most:
        raise RequestError(f"{name} has {len(entries)} entries; at most {most} are allowed.")
    return entries
