"""The zoo's models of transformers over several calls: given and returned caches, states, `generate`, training."""

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn
from transformers import DynamicCache, StaticCache
from zoo_entry import (
    CANNOT_MERGE,
    KEEPS_STATE,
    OVERLAPS,
    SIZES,
    Act,
    Call,
    Entry,
    Outcome,
    generating,
    given,
    growing,
    left_padded_tokens,
    of_family,
    one_of,
    padded_tokens,
    pretrained,
    token_ids,
    tokens,
    training_step,
)
from zoo_transformers import encoded_and_decoded

HEADS = 4


def chunks(cache: Callable[[nn.Module], Any], name: str = "past_key_values") -> Act:
    """A prefill, a second chunk and a decode step, with a cache that is given and changed in place."""

    def act(module: Any, call: Call) -> Any:
        given_cache = cache(module)
        results = []
        for ids in call.kwargs["input_ids"].split([4, 2, 1], 1):
            output = module(input_ids=ids, **{name: given_cache}, use_cache=True)
            same = output[name] is given_cache
            results.append((output.logits, same))
        return results, given_cache

    return act


def returned(name: str) -> Act:
    """A prefill that makes a cache or state, and two steps with what was returned."""

    def act(module: Any, call: Call) -> Any:
        kept, results = None, []
        for ids in call.kwargs["input_ids"].split([5, 1, 1], 1):
            output = module(input_ids=ids, **{name: kept}, use_cache=True)
            kept = getattr(output, name)
            results.append(output.logits)
        return results, kept

    return act


def seven_tokens(batch: int) -> Call:
    return given(input_ids=token_ids(batch, 7))


def static_cache(module: Any) -> StaticCache:
    return StaticCache(config=module.config, max_cache_len=16)


def dynamic_cache(module: Any) -> DynamicCache:
    return DynamicCache(config=module.config)


RETURNED = returned("past_key_values")
_space, _trained = of_family("state-space"), of_family("training", grad=True, act=training_step)
_generated = of_family("generate", collides=(HEADS, "heads"))
_cached = of_family("caches", collides=(HEADS, "heads"))


def _given(kind: str, how: str, config: dict[str, Any], act: Act, **fields: Any) -> Entry:
    """Several calls with a cache."""
    return _cached(f"{kind}, {how}", pretrained(kind, **config), seven_tokens, act=act, **fields)


def _train(kind: str, config: dict[str, Any], arguments: Callable[[int], Call], **fields: Any) -> Entry:
    return _trained(f"{kind}, training step", growing(pretrained(kind, **config)), arguments, **fields)


def _generate(kind: str, config: dict[str, Any], how: str, outcome: Outcome = OVERLAPS, **options: Any) -> Entry:
    at: dict[int, Outcome] = {1: outcome} if options.get("num_beams", 1) > 1 else {}
    build, arguments = pretrained(kind, **config), options.pop("arguments", left_padded_tokens)
    return _generated(f"{kind}.generate, {how}", build, arguments, outcome, at=at, act=generating(**options))


def _hybrid(
    kind: str, config: dict[str, Any], outcome: Outcome = OVERLAPS, generates: Outcome = OVERLAPS
) -> list[Entry]:
    """A call, and `generate` with the cache of its own."""
    build, generate = pretrained(kind, **config), generating(max_new_tokens=3)
    return [
        _space(kind, build, padded_tokens, outcome, collides=(HEADS, "heads, states")),
        _space(f"{kind}.generate", build, tokens, generates, collides=(3, "new tokens"), act=generate),
    ]


def rwkv() -> nn.Module:
    """It notes at its first call that its weights are not scaled."""
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**SIZES.rwkv, rescale_every=0)).eval()


TRAINED = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}

ENTRIES = [
    *_hybrid("MambaForCausalLM", SIZES.ssm),
    *_hybrid("Mamba2ForCausalLM", SIZES.mamba2),
    *_hybrid("JambaForCausalLM", SIZES.jamba),
    *_hybrid("Lfm2ForCausalLM", SIZES.lfm2),
    *_hybrid("Qwen3NextForCausalLM", SIZES.next),
    *_hybrid("FalconH1ForCausalLM", {**SIZES.bamba, "mamba_d_ssm": 32}),
    *_hybrid("BambaForCausalLM", SIZES.bamba),
    *_hybrid("RecurrentGemmaForCausalLM", SIZES.griffin, KEEPS_STATE, KEEPS_STATE),
    _space("RwkvForCausalLM", rwkv, tokens, one_of(OVERLAPS, KEEPS_STATE)),
    _space(
        "RwkvForCausalLM with its state",
        rwkv,
        seven_tokens,
        one_of(OVERLAPS, CANNOT_MERGE),  # its step broadcasts the states [B, E] over the rows: logits [B, B, V]
        act=returned("state"),
    ),
    _given("LlamaForCausalLM", "a DynamicCache given", SIZES.llama, chunks(dynamic_cache)),
    _given(
        "MistralForCausalLM",
        "a sliding cache given",
        {**SIZES.llama, "sliding_window": 4},
        chunks(dynamic_cache),
        collides=(HEADS, "heads, window"),
    ),
    _given("LlamaForCausalLM", "a StaticCache given", SIZES.llama, chunks(static_cache)),
    _given("Qwen3MoeForCausalLM", "the returned cache", {**SIZES.moe, "head_dim": 4}, RETURNED),
    _given("Lfm2ForCausalLM", "the returned cache", SIZES.lfm2, RETURNED),
    _given("GPT2LMHeadModel", "the returned cache", SIZES.gpt, RETURNED),
    _generate("LlamaForCausalLM", SIZES.llama, "greedy"),
    _generate("LlamaForCausalLM", SIZES.llama, "without a cache", use_cache=False),
    _generate("GPT2LMHeadModel", SIZES.gpt, "3 beams", num_beams=3),
    _generate("Qwen3MoeForCausalLM", {**SIZES.moe, "head_dim": 4}, "sampling", do_sample=True, top_k=20),
    _generate(
        "Qwen3MoeForCausalLM",
        {**SIZES.moe, "head_dim": 4},
        "2 beams, scores and states",
        num_beams=2,
        return_dict_in_generate=True,
        output_scores=True,
        output_hidden_states=True,
    ),
    _generate("MixtralForCausalLM", SIZES.moe, "sampling in beams", num_beams=2, do_sample=True),
    _generate("GPTNeoXForCausalLM", {**SIZES.base, **SIZES.no_ends}, "greedy, penalised", repetition_penalty=1.5),
    _generate("T5ForConditionalGeneration", SIZES.t5, "greedy", arguments=padded_tokens),
    _generate("BartForConditionalGeneration", SIZES.seq2seq, "2 beams", num_beams=2, arguments=padded_tokens),
    _train("GPT2LMHeadModel", {**SIZES.gpt, **TRAINED}, tokens),
    _train("LlamaForCausalLM", SIZES.llama, padded_tokens),
    _train("MixtralForCausalLM", SIZES.moe, tokens, collides=(HEADS, "heads, experts")),
    _train("BartModel", {**SIZES.seq2seq, **NO_DROPOUT}, encoded_and_decoded),
    _trained("BertModel, gradients in eval", pretrained("BertModel", **SIZES.base), padded_tokens),
]
