"""Masks against a naive reference: token by token, is it one that llguidance would take? Drafts that a grammar cuts."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
import torch
from grammars import Rule, RuleMasks, compiler, regex, schema
from llguidance import LLParserLimits
from repository import TINY_CHAT

from model_runner import Draft, GrammarRows, RequestError, SamplingParams
from model_runner.sampling.rows import fill_masks
from serving.scheduler.request import TrackedRequest
from serving.scheduler.speculation import _obeying
from serving.structured import matcher as matchers
from serving.structured.matcher import GrammarCompiler, Matcher, grammar_tokenizer, load_grammar_tokenizer
from serving.text.tokenizer import load_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")

PERSON = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
ENDS = (2, 0)
SPARE = 40
"""Tokens of the model that the tokenizer does not know."""
VOCAB = 1024 + SPARE


@pytest.fixture(scope="module")
def encode() -> object:
    tokenizer = load_tokenizer(TINY_CHAT)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def grammar(text: str) -> Matcher:
    found = compiler(TINY_CHAT, VOCAB).begin(text).result(30)()
    assert isinstance(found, Matcher)
    return found


def allowed(masks: torch.Tensor) -> list[list[int]]:
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1)[:, :VOCAB]
    return [row.nonzero().flatten().tolist() for row in bits]


def naive(text: str, output: Sequence[int]) -> list[int]:
    """Every token that may come after an output; where the text is forced, only that of its usual tokens."""
    state = grammar(text).matcher
    assert state.try_consume_tokens(list(output)) == len(output)
    if state.is_stopped():
        return sorted(ENDS)
    allowed = [token for token in range(VOCAB) if state.validate_tokens([token]) == 1]
    forced = state.compute_ff_tokens()[:1]
    assert set(forced) <= set(allowed)
    return forced or allowed


CASES = [
    (PERSON, ['{"a":', "-", "1", "2", "}"]),
    (regex("(ab|a)c?"), ["a", "c"]),
    (regex(r"[0-9]{3}-\d{2}"), ["12", "3-4"]),
    (regex("[äß€]{1,2}"), ["ä", "€"]),
]


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_masks_against_a_naive_reference(text: str, parts: list[str], encode: object) -> None:
    tokens = [token for part in parts for token in encode(part)]  # type: ignore[operator]
    stepwise, ahead = grammar(text), grammar(text)
    expected = [naive(text, tokens[:count]) for count in range(len(tokens) + 1)]
    for count, each in enumerate(expected):
        assert allowed(fill_masks([GrammarRows(stepwise, 0)])) == [each]  # type: ignore[arg-type]
        assert not any(token >= 1024 for token in each), "what the tokenizer does not know is never allowed"
        stepwise.advance(tokens[count : count + 1])
    chain = fill_masks([GrammarRows(ahead, 0, tuple(tokens))])
    assert allowed(chain) == expected  # type: ignore[arg-type]
    assert ahead.count_allowed(tokens) == ahead.count_allowed([*tokens, 1023]) == len(tokens)
    assert ahead.num_tokens == 0
    assert not stepwise.failure
    assert not ahead.failure


def test_masks_of_many_with_drafts_and_trees(encode: object) -> None:
    """Refused drafts, what follows them, and what follows an end, have no token; nobody's state moves."""
    a, b = (encode(text)[0] for text in "ab")  # type: ignore[operator]
    text = regex("ab?a?")
    chain, tree, done = (grammar(text) for _ in range(3))
    done.advance([a, b, a])
    drafts = (a, b, a, 2)
    parents = (0, 1, 1, 3)
    requests = [
        GrammarRows(chain, 0, (a, 7, a, a)),
        GrammarRows(tree, 5, drafts, parents),
        GrammarRows(done, 10, (0, 0, a, b)),
    ]
    none: list[int] = []
    after = {path: naive(text, path) for path in ((), (a,), (a, b), (a, a))}
    for _ in range(2):
        found = allowed(fill_masks(requests))  # type: ignore[arg-type]
        assert found[:5] == [after[()], after[a,], none, none, none]
        assert found[5:9] == [after[()], after[a,], after[a, b], after[a, a]]
        assert found[10] == sorted(ENDS)
        assert found[13:] == [none] * 2
        assert not any(request.grammar.failure for request in requests)


def test_a_grammar_that_cannot_go_on_says_why(monkeypatch: pytest.MonkeyPatch, encode: object) -> None:
    """It allows nothing then, in place of an end that would look like a whole output."""
    fine, refusing = grammar(regex("a+")), grammar(regex("a+"))
    refusing.advance([5])
    found = allowed(fill_masks([GrammarRows(fine, 0), GrammarRows(refusing, 1, (7, 7))]))  # type: ignore[arg-type]
    assert found[0]
    assert found[1:] == [[]] * 3
    assert "not allowed" in refusing.failure
    tight = LLParserLimits(step_max_items=10, verbose_errors=False)
    monkeypatch.setattr(matchers, "limits", lambda: tight)
    limited = GrammarCompiler(lambda: load_grammar_tokenizer(TINY_CHAT, VOCAB, ENDS)).begin(schema({"type": "object"}))
    state = limited.result(30)()
    for token in encode('{"a":{"b":[1,{"c":2}'):  # type: ignore[operator]
        assert allowed(fill_masks([GrammarRows(state, 0)]))  # type: ignore[arg-type]
        if state.failure:
            break
        state.advance([token])
    assert "Too many items" in state.failure
    assert allowed(fill_masks([GrammarRows(state, 0)])) == [[]]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["rubbish", '{"grammars": []}', regex("(("), schema({"type": "nothing"})])
def test_a_text_that_is_no_grammar(text: str) -> None:
    begun = compiler().begin(text)
    with pytest.raises(RequestError, match="the grammar of the structured output cannot be used") as error:
        begun.result(30)
    assert error.value.param == "grammar"


def test_equal_texts_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []

    def load() -> object:
        loads.append(1)
        return load_grammar_tokenizer(TINY_CHAT, VOCAB, ENDS)

    monkeypatch.setattr(matchers, "MAX_KNOWN", 2)
    own = GrammarCompiler(load)  # type: ignore[arg-type]
    first = own.begin(PERSON)
    assert own.begin(PERSON) is first
    states = first.result(30)(), first.result(30)()
    states[0].advance([93])
    assert [state.num_tokens for state in states] == [1, 0], "each request has a state of its own"
    for pattern in "bc":
        own.begin(regex(pattern)).result(30)
    assert own.begin(regex("c")) is own.begin(regex("c"))
    assert own.begin(PERSON) is not first, "the oldest is forgotten"
    broken = own.begin("rubbish")
    assert broken.exception(30) is not None
    assert own.begin("rubbish") is not broken
    assert loads == [1]


def test_what_has_not_begun_is_given_up_at_the_end() -> None:
    gate = Event()

    def load() -> object:
        assert gate.wait(30)
        return load_grammar_tokenizer(TINY_CHAT, VOCAB, ENDS)

    own = GrammarCompiler(load)  # type: ignore[arg-type]
    begun = [own.begin(regex(pattern)) for pattern in "abc"]
    own.close()
    gate.set()
    assert [begun[place].result(30)().failure for place in (0, 1)] == ["", ""]
    assert begun[2].cancelled()


def test_what_took_long_to_compile_is_large_and_few_of_these_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 2))  # each takes two seconds
    monkeypatch.setattr(matchers.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(matchers, "MAX_KNOWN_S", 5)
    own = compiler()
    made = [own.begin(regex(pattern)).result(30) for pattern in "abcd"]
    assert [each.seconds for each in made] == [2, 2, 2, 2]
    assert list(own._known) == [regex(pattern) for pattern in "bcd"]


def test_tokenizers(tmp_path: Path) -> None:
    """From the checkpoint's files, and from transformers' tokenizer: the same; what does not fit is refused by name."""
    whole = grammar_tokenizer(load_tokenizer(TINY_CHAT), VOCAB, ENDS)
    read = load_grammar_tokenizer(TINY_CHAT, VOCAB, ENDS)
    tokens = range(1024)
    assert whole.vocab_size == read.vocab_size == VOCAB
    assert [whole.decode_bytes([each]) for each in tokens] == [read.decode_bytes([each]) for each in tokens]
    assert [whole.is_special_token(each) for each in tokens] == [read.is_special_token(each) for each in tokens]
    assert sorted(whole.eos_tokens) == sorted(read.eos_tokens) == [0, 2]
    cuts = load_tokenizer(TINY_CHAT)
    cuts.backend_tokenizer.enable_truncation(2)
    cuts.backend_tokenizer.enable_padding(length=9)
    assert grammar_tokenizer(cuts, VOCAB, ENDS).tokenize_str("a long text") == whole.tokenize_str("a long text")
    assert load_grammar_tokenizer(TINY_CHAT, 100, ENDS).vocab_size == 1024, "a tokenizer may know more than the model"
    with pytest.raises(RequestError, match="need an end-of-sequence token"):
        load_grammar_tokenizer(TINY_CHAT, VOCAB, ())
    with pytest.raises(RequestError, match=r"need the model's tokenizer: .* has no tokenizer"):
        load_grammar_tokenizer(tmp_path, VOCAB, ENDS)
    with pytest.raises(RequestError, match=r"need a tokenizer with a tokenizer\.json; this model's is a str"):
        grammar_tokenizer("slow", VOCAB, ENDS)  # type: ignore[arg-type]


PROBS = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (Draft((2, 3, 4, 5)), Draft((2, 3, 4, 5))),
        (Draft((2, 3, 9, 5)), Draft((2, 3))),
        (Draft((9, 2)), Draft(())),
        (Draft((1, 1, 2, 4), (0, 0, 1, 3)), Draft((), ())),
        (Draft((9, 2, 3, 3, 8), (0, 0, 1, 2, 4)), Draft((2, 3), (0, 1))),
        (Draft((2, 2, 3, 3, 4), (0, 0, 1, 2, 4)), Draft((2, 2, 3, 3, 4), (0, 0, 1, 2, 4))),
    ],
)
def test_drafts_are_cut(given: Draft, kept: Draft) -> None:
    """Every token is one above the one before. After the output 0, 1 that is 2."""
    request = a_request()
    assert _obeying(request, given) == kept
    assert request.grammar is not None
    assert request.grammar.num_tokens == 2, "the state follows the output, not the drafts"


@pytest.mark.parametrize(("tokens", "count"), [((2, 3, 4, 5), 4), ((2, 3, 9, 5), 3), ((9, 2, 3, 4), 1)])
def test_a_refused_draft_that_was_drawn_is_left_to_rejection(tokens: tuple[int, ...], count: int) -> None:
    """Without it, the token in its place would not be drawn from what the target leaves."""
    kept = _obeying(a_request(), Draft(tokens, None, PROBS))
    assert kept.tokens == tokens[:count]
    assert kept.probs is not None
    assert torch.equal(kept.probs, PROBS[:count])


def a_request() -> TrackedRequest:
    rule = Rule(lambda output: [len(output)], RuleMasks(1))
    request = TrackedRequest("a", [7, 7, 7], SamplingParams(grammar="any text"), limit=90, grammar=rule)
    request.token_ids += [0, 1]
    return request
