"""Whole engines with grammars: every finished output obeys, and is a function of its request alone."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_mtp_checkpoint
from engine_mains import core_over
from fake_runner import be_optimistic
from grammars import Later, compiler, made, regex, schema
from repository import TINY_CHAT, TINY_MOE

from model_runner import FinishReason, ModelRunner, RequestError, SamplingParams, generate
from serving import LLM, EngineArgs, LLMEngine
from serving.engine.rank.core import EngineCore
from serving.requests import RequestInput, RequestOutput
from serving.structured import matcher as matchers
from serving.text.tokenizer import load_tokenizer
from ubatch import UBatchConfig

pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")

pytestmark = pytest.mark.long

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PHONE = "[0-9]{3}-[0-9]{4}"
WARM = {"temperature": 1.0, "max_tokens": 60}
REQUESTS: dict[str, SamplingParams] = {
    "free": SamplingParams(max_tokens=30, ignore_eos=True),
    "person": SamplingParams(max_tokens=60, grammar=schema(PERSON)),
    "person, warm": SamplingParams(**WARM, seed=1, grammar=schema(PERSON)),
    "free, warm": SamplingParams(max_tokens=20, temperature=1.0, seed=2, ignore_eos=True),
    "phone": SamplingParams(max_tokens=60, ignore_eos=True, grammar=regex(PHONE)),
    "phone, penalised": SamplingParams(**WARM, seed=3, frequency_penalty=0.5, logprobs=2, grammar=regex(PHONE)),
}
PROMPTS = {name: [1, 400 + place, 17, 33 + place] * (1 + place) for place, name in enumerate(REQUESTS)}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_CHAT)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with ModelRunner(TINY_CHAT, num_kv_blocks=120, block_size=4, max_num_seqs=8) as runner:
        yield runner


def constrained(runner: ModelRunner, *, overlap: bool, **config: Any) -> EngineCore:
    core = core_over(runner, overlap=overlap, **{**SMALL, "enable_prefix_caching": False, **config})
    core._grammars = compiler()
    return core


def serve(core: EngineCore, requests: Mapping[str, SamplingParams]) -> dict[str, RequestOutput]:
    """Requests to their end."""
    parts: dict[str, list[RequestOutput]] = {name: [] for name in requests}
    for name, params in requests.items():
        core.add(RequestInput(name, PROMPTS[name.split("/")[0]], params))
    while core.has_work:
        core.wait(30)
        for request_id in core.ready():
            core.admit(request_id)
        for output in core.step():
            parts[output.request_id].append(output)
    core.scheduler.check(idle=True)
    return {name: RequestOutput.merged(own) for name, own in parts.items()}


def tokens(outputs: Mapping[str, RequestOutput]) -> dict[str, list[int]]:
    return {name: list(output.token_ids) for name, output in outputs.items()}


def check_forms(outputs: Mapping[str, RequestOutput], tokenizer: Any) -> None:
    for name, output in outputs.items():
        text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
        if name.startswith("free"):
            assert output.finish_reason is FinishReason.LENGTH
        else:
            assert output.finish_reason is FinishReason.STOP
            assert output.stop_token in (0, 2)
        if name.startswith("phone"):
            assert re.fullmatch(PHONE, text)
        if name.startswith("person"):
            person = json.loads(text)
            assert list(person) == ["name", "age"]
            assert len(person["name"]) <= 8
            assert 0 <= person["age"] <= 99


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[str, list[int]]:
    """What each request gives by itself."""
    core = constrained(runner, overlap=False)
    return {name: tokens(serve(core, {name: params}))[name] for name, params in REQUESTS.items()}


# ------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_obey_and_depend_on_their_request_alone(
    runner: ModelRunner, tokenizer: Any, alone: dict[str, list[int]], overlap: bool, lanes: bool
) -> None:
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    with ModelRunner(TINY_CHAT, num_kv_blocks=120, block_size=4, max_num_seqs=8, dbo=dbo) as own:
        core = constrained(own, overlap=overlap, enable_prefix_caching=True)
        outputs = serve(core, REQUESTS)
        again = serve(core, REQUESTS)  # from the prefix cache
    check_forms(outputs, tokenizer)
    assert tokens(outputs) == tokens(again) == alone
    assert len(outputs["phone, penalised"].logprobs) == len(outputs["phone, penalised"].token_ids)
    engaged = core.statistics().steps.get("decode/engaged", 0)
    assert engaged > 20 if lanes else engaged == 0


def test_retraction_keeps_the_state(alone: dict[str, list[int]]) -> None:
    with ModelRunner(TINY_CHAT, num_kv_blocks=26, block_size=4, max_num_seqs=8) as runner:
        core = constrained(runner, overlap=True, max_model_len=90, enable_prefix_caching=True)
        be_optimistic(core)  # type: ignore[arg-type]
        outputs = serve(core, REQUESTS)
    assert tokens(outputs) == alone
    assert core.statistics().preemptions > 0


def test_a_document_that_is_cut(runner: ModelRunner, alone: dict[str, list[int]]) -> None:
    cut = serve(constrained(runner, overlap=True), {"person": replace(REQUESTS["person"], max_tokens=3)})["person"]
    assert (list(cut.token_ids), cut.finish_reason) == (alone["person"][:3], FinishReason.LENGTH)


def test_other_parameters_may_leave_nothing(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request ends by itself, says why, and what it has said obeys."""
    phone = regex("ab?")
    a, b, other = 67, 68, 9
    outputs = serve(
        constrained(runner, overlap=True),
        {
            "free": REQUESTS["free"],
            "phone/allowed": SamplingParams(max_tokens=9, grammar=phone, allowed_token_ids=(other,)),
            "phone/bias": SamplingParams(max_tokens=9, grammar=phone, logit_bias=((b, 100.0), (other, 100.0))),
            "phone/bad": SamplingParams(max_tokens=9, grammar=phone, bad_token_sequences=((a, b), (a, 0))),
            "phone/late": SamplingParams(max_tokens=9, grammar=phone, min_tokens=4, logit_bias=((b, 100.0),)),
            "phone/stop": SamplingParams(max_tokens=9, grammar=phone, stop_token_ids=(a,), logit_bias=((a, 100.0),)),
        },
    )
    found = {name: (list(o.token_ids), o.finish_reason) for name, o in outputs.items() if name != "free"}
    left = FinishReason.NO_TOKEN_LEFT
    assert found.pop("phone/bad") == ([a, 2], FinishReason.STOP)
    assert found.pop("phone/bias")[0][:2] in ([a, b], [497, 2], [497, 0])
    assert found == {"phone/allowed": ([], left), "phone/late": ([a, b], left), "phone/stop": ([a], FinishReason.STOP)}
    assert len(outputs["free"].token_ids) == 30


def test_a_grammar_that_fails_ends_its_request(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    look, fails_at = matchers.Matcher.look_for_failure, 4

    def tired(self: matchers.Matcher) -> str:
        if self.num_tokens == fails_at:
            self.failure = "too many items"
        return look(self)

    whole = tokens(serve(constrained(runner, overlap=True), {"phone": REQUESTS["phone"]}))["phone"]
    monkeypatch.setattr(matchers.Matcher, "look_for_failure", tired)
    outputs = serve(constrained(runner, overlap=True), {name: REQUESTS[name] for name in ("phone", "free")})
    assert list(outputs["phone"].token_ids) == whole[:fails_at]
    assert outputs["phone"].finish_reason is FinishReason.GRAMMAR
    assert len(outputs["free"].token_ids) == 30


# ------------------------------------------------------------------------------------------ requests without a grammar


def test_a_request_waits_for_its_grammar_and_holds_nobody_up(runner: ModelRunner) -> None:
    core = core_over(runner, overlap=True, **SMALL)
    core._grammars = later = Later()
    text = REQUESTS["phone"].grammar
    assert text is not None
    for name in ("phone", "phone/aborted"):
        core.add(RequestInput(name, PROMPTS["phone"], REQUESTS["phone"]))
    with pytest.raises(RequestError, match="'phone' is alive already"):
        core.add(RequestInput("phone", [1], REQUESTS["free"]))
    with pytest.raises(RequestError, match="'long' has 200 tokens"):
        core.add(RequestInput("long", [1] * 200, REQUESTS["phone"]))
    assert core.statistics().num_waiting == 2
    core.add(RequestInput("free", PROMPTS["free"], REQUESTS["free"]))
    told = [output.request_id for _ in range(8) for output in core.step()]
    assert told.count("free") >= 6
    assert core.ready() == () or list(core.ready()) == []
    assert core.abort("phone/aborted")
    later.finish(text)
    assert list(core.ready()) == ["phone"]
    core.admit("phone/aborted")  # which has been aborted: nothing happens
    core.admit("phone")
    assert core.ready() == ()
    rest = [output for _ in range(60) for output in core.step()]
    assert {output.request_id for output in rest} == {"phone", "free"}
    assert not core.has_work


def test_who_makes_no_grammars_refuses_by_name(runner: ModelRunner) -> None:
    core = core_over(runner, **SMALL)
    with pytest.raises(RequestError, match="makes no grammars"):
        core.add(RequestInput("a", [1], REQUESTS["phone"]))
    with pytest.raises(RequestError, match="prompt 0 has a grammar, which `generate` cannot follow"):
        generate(runner, [[1]], REQUESTS["phone"])
    for params, grammar in ((REQUESTS["phone"], None), (REQUESTS["free"], made(regex("a")))):
        with pytest.raises(RequestError, match="needs a grammar if it has the text of one"):
            core.scheduler.add(RequestInput("a", [1], params), grammar)


def test_a_grammar_that_cannot_be_made() -> None:
    """Offline: the error names what is wrong, its request is gone, and the next one works."""
    rubbish = SamplingParams(grammar="rubbish")
    options = {"max_num_seqs": 2, "kv_cache_memory": "8M", "max_model_len": 128}
    engine = LLMEngine(EngineArgs(model=str(TINY_CHAT), **options))
    with closing(engine), LLM(TINY_CHAT, **options) as llm:
        engine.add_request("a", "1", rubbish)
        for run in (engine.step, partial(llm.generate, "1", [rubbish])):
            with pytest.raises(RequestError, match="grammar of the structured output cannot be used"):
                run()
        assert not engine.has_unfinished_requests()
        (output,) = llm.generate("1", [REQUESTS["phone"]])
    assert re.fullmatch(PHONE, output.outputs[0].text)


# --------------------------------------------------------------------------------------------------------- speculation

PEOPLE = '{"name": "x", "age": 7} {"name": "y", "age": '
TEXTS = ["import os\nimport sys\n", "555-0000, 555-0001, ", PEOPLE, "0 1 2 3 0 1 2 3"]
NGRAM = {"speculative_algorithm": "ngram", "speculative_ngram_min": 1}
MODEL = {"speculative_algorithm": "draft_model", "speculative_draft_model_path": TINY_MOE}
EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model_path": TINY_MOE.parent / "tiny-moe-eagle"}
TINY = {"max_num_seqs": 4, "kv_cache_memory": "16M", "max_model_len": 256}


def drafted(**own: Any) -> list[SamplingParams]:
    """Of the texts, in their order; the last one is free."""
    forms = regex("(import [a-z]{1,6}\n)+[0-9]"), regex(f"({PHONE}, ){{3}}"), schema(PERSON)
    return [SamplingParams(max_tokens=40, grammar=form, **own) for form in (*forms, None)]


@pytest.fixture(scope="module")
def undrafted() -> list[list[tuple[int, ...]]]:
    with LLM(TINY_MOE, **TINY) as llm:
        return [said(llm, drafted()), said(llm, drafted(temperature=1.0, seed=5))]


def said(llm: LLM, params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    outputs = [output.outputs[0] for output in llm.generate(TEXTS, params)]
    assert outputs[1].finish_reason != FinishReason.STOP or re.fullmatch(f"({PHONE}, ){{3}}", outputs[1].text)
    assert outputs[2].finish_reason == FinishReason.STOP
    assert json.loads(outputs[2].text).keys() == {"name", "age"}
    return [output.token_ids for output in outputs]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "speculation",
    [
        NGRAM,
        MODEL,
        {**MODEL, "speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 5},
        EAGLE,
        {**EAGLE, "speculative_eagle_topk": 3},
    ],
    ids=["ngram", "draft_model", "draft_model_tree", "eagle", "eagle_tree"],
)
def test_drafts_change_no_output(speculation: dict[str, Any], undrafted: list[list[tuple[int, ...]]]) -> None:
    with LLM(TINY_MOE, **TINY, **speculation) as llm:
        assert said(llm, drafted()) == undrafted[0]
        assert said(llm, drafted(temperature=1.0, seed=5)) == undrafted[1]
        assert llm.statistics[0].accepted_tokens > 20


@pytest.mark.wide
def test_drafts_of_the_models_own_layer_change_no_output(tmp_path: Path) -> None:
    """Multi-token prediction, by a random model: most drafts are refused, by the grammar or the model."""
    path = make_mtp_checkpoint(tmp_path, vocab_size=2048, bos_token_id=1, eos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_MOE / name, path / name)
    found = []
    for speculation in ({}, {"speculative_algorithm": "mtp", "speculative_num_steps": 3}):
        with LLM(path, **TINY, **speculation) as llm:
            found.append([said(llm, drafted()), said(llm, drafted(temperature=1.0, seed=5))])
            drafts = llm.statistics[0].drafted_tokens
    assert drafts > 20
    assert found[0] == found[1]


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["draft_model", "ngram"])
def test_rejection_sampling_obeys(algorithm: str) -> None:
    speculation = MODEL if algorithm == "draft_model" else NGRAM
    with LLM(TINY_MOE, **TINY, speculative_accept="rejection", **speculation) as llm:
        for seed in range(4):
            said(llm, drafted(temperature=1.0, seed=seed))
        assert llm.statistics[0].accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(140)
@pytest.mark.parametrize("speculation", [{}, EAGLE], ids=["plain", "eagle"])
def test_tensor_parallel_ranks_agree(speculation: dict[str, Any], undrafted: list[list[tuple[int, ...]]]) -> None:
    """Two processes, each with grammars of its own, stay in step and give what one rank gives."""
    with LLM(TINY_MOE, **TINY, tensor_parallel_size=2, enable_expert_parallel=True, **speculation) as llm:
        assert said(llm, drafted()) == undrafted[0]
        assert said(llm, drafted(temperature=1.0, seed=5)) == undrafted[1]
