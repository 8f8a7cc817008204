"""A model with one embedding that is nan: requests that use it end with an error, and nobody else notices.

Not those in the same steps, not those that get their pages later, not those that begin alike; in every loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_graph_cases import TINY, make_captured
from safetensors.torch import load_file, save_file

from model_runner import FinishReason, ModelRunner, RandomDeepseekV3, SamplingParams, generate, make_random_checkpoint
from model_runner.generate import GenerationOutput
from serving import LLM
from serving.offline.outputs import CompletionOutput

pytestmark = pytest.mark.long

BAD = 60
"""A token whose embedding is nan, as that of token 0, which a network drafts whose logits are all the same."""
DEEPSEEK = RandomDeepseekV3(
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 8, "moe_intermediate_size": 16, "max_position_embeddings": 128},
    tie_word_embeddings=False,
)
NEVER_BAD: dict[str, Any] = {"ignore_eos": True, "max_tokens": 12, "logit_bias": ((0, -100.0), (BAD, -100.0))}
SAMPLED: dict[str, Any] = {"temperature": 0.9, **NEVER_BAD}
PROMPTS = [[1, 2, 3], [7, 8, 9, 10, 11, 12, 13], [20, 21] * 8, [30]]
PARAMS = [
    SamplingParams(**NEVER_BAD),
    SamplingParams(seed=1, top_p=0.8, **SAMPLED),
    SamplingParams(seed=2, logprobs=2, **SAMPLED),
    SamplingParams(seed=3, top_k=5, repetition_penalty=1.2, **SAMPLED),
]
# In the middle of a prompt, at its begin and its end, behind pages that others share, and generated.
BAD_PROMPTS = [[7, 8, 9, 10, BAD, 12, 13], [BAD, 1], [20, 21] * 6 + [BAD], [5, 6], [1, 2, 3, BAD] + [4] * 20]
NEXT_IS_BAD = SamplingParams(max_tokens=12, logit_bias=((BAD, 100.0),))
BAD_PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=4, top_p=0.5),
    SamplingParams(temperature=1.0, seed=5, logprobs=3),
    NEXT_IS_BAD,
    SamplingParams(prompt_logprobs=1, presence_penalty=0.5),
]
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"overlap_schedule": False},
    "overlapped": {"overlap_schedule": True},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "chunks, overlapped": {"max_num_batched_tokens": 9, "max_num_seqs": 9, "overlap_schedule": True},
    "lanes": {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2},
    "fp8": {"kv_cache_dtype": "fp8"},
    "drafts": {"speculative_algorithm": "ngram", "speculative_ngram_min": 1},
    "rejection": {"speculative_algorithm": "ngram", "speculative_ngram_min": 1, "speculative_accept": "rejection"},
    "torch": {"attention_backend": "torch", "moe_backend": "grouped"},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            size = DEEPSEEK if name == "mla" else replace(TINY, tie_word_embeddings=False)
            folder = tmp_path_factory.mktemp(name)
            made[name] = make_random_checkpoint(folder, size, 3, dtype=torch.float32)
            for file in folder.glob("*.safetensors"):
                tensors = load_file(file)
                if "model.embed_tokens.weight" in tensors:
                    tensors["model.embed_tokens.weight"][[0, BAD]] = float("nan")
                if name == "drafts" and "lm_head.weight" in tensors:
                    tensors["lm_head.weight"].zero_()
                save_file(tensors, file, metadata={"format": "pt"})
        return made[name]

    return get


def make_llm(model: Path, **options: Any) -> LLM:
    pages = 48 * 4 * 2 * (24 if model.name.startswith("mla") else 64)  # numbers of 48 pages: they are used again
    memory = pages * (1 if options.get("kv_cache_dtype") == "fp8" else 4)
    small = {"max_num_seqs": 16, "kv_cache_memory": str(memory), "block_size": 4, "max_model_len": 64}
    return LLM(model, skip_tokenizer_init=True, **(small | options))


def tokens(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def mixed(llm: LLM) -> list[CompletionOutput]:
    """The completions of the bad prompts, and of the others behind them."""
    outputs = llm.generate(BAD_PROMPTS + PROMPTS, BAD_PARAMS + PARAMS, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def check(outputs: Sequence[CompletionOutput | GenerationOutput], clean: Sequence[tuple[int, ...]]) -> None:
    """The bad ones end with an error, with the tokens before it, and the others as they do alone."""
    bad, good = outputs[:5], outputs[5:]
    assert [each.finish_reason for each in bad] == [FinishReason.ERROR] * 5
    assert [tuple(each.token_ids) for each in bad] == [(), (), (), (BAD,), ()]
    assert [tuple(each.token_ids) for each in good] == clean


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", ["plain", "overlapped", "chunks, overlapped", "lanes", "drafts", "rejection"])
def test_who_runs_out_of_tokens_is_not_corrupted(models: Callable[[str], Path], loop: str) -> None:
    """Also in the same steps as others that are. What it has written may be shared."""
    ids, bad = (7, 8), ((7, 7, 7), (7, 8), (8, 7), (8, 8))
    stuck = SamplingParams(max_tokens=12, allowed_token_ids=ids, bad_token_sequences=bad, logit_bias=((7, 90.0),))
    asked = [stuck, replace(stuck, temperature=0.9, seed=3), replace(stuck, frequency_penalty=1.0, logprobs=1)]
    prompts = [[7] * 9, [1, 7, 7, 2, 7, 7], [20, 21] * 8]
    with make_llm(models("mha"), **LOOPS[loop]) as llm:
        clean = tokens(llm, PROMPTS, PARAMS)
        for _ in range(2):
            together = llm.generate(
                [*prompts, BAD_PROMPTS[0], *PROMPTS], [*asked, BAD_PARAMS[0], *PARAMS], use_tqdm=False
            )
            *own, bad_one = (each.outputs[0] for each in together[:4])
            good = [each.outputs[0] for each in together[4:]]
            assert [each.token_ids for each in own] == [[7, 7]] * 3
            assert {each.finish_reason for each in own} == {FinishReason.NO_TOKEN_LEFT}
            assert all("bad_words" in str(each.error) for each in own)
            assert bad_one.finish_reason == "error"
            if loop != "rejection":  # who shares a step has a say in how many drafts it has
                assert [tuple(each.token_ids) for each in good] == clean
        statistics = llm.statistics[0]
        assert (statistics.corrupted_requests, statistics.num_running, statistics.num_waiting) == (2, 0, 0)
        if loop in ("drafts", "rejection"):
            assert statistics.num_drafts > 0


@pytest.mark.sample(9)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", ["mha", "mla"])
def test_only_who_uses_it_ends_with_an_error(models: Callable[[str], Path], model: str, loop: str) -> None:
    with make_llm(models(model), **LOOPS[loop]) as llm:
        clean = tokens(llm, PROMPTS, PARAMS)
    with make_llm(models(model), **LOOPS[loop]) as llm:
        for _ in range(3):
            outputs = mixed(llm)
            check(outputs, clean)
            assert ["not finite" in str(each.error) for each in outputs] == [True] * 5 + [False] * 4
        # Whoever begins like them, and whoever gets their pages.
        assert tokens(llm, PROMPTS, PARAMS) == clean
        alike = [[7, 8, 9, 10, 11], [20, 21] * 7, [1, 2, 3, 4]]
        behind = tokens(llm, alike, [PARAMS[0]] * 3)
        statistics = llm.statistics[0]
        assert statistics.corrupted_requests == 15
        assert statistics.num_running == statistics.num_waiting == 0
    with make_llm(models(model), **LOOPS[loop]) as llm:
        assert tokens(llm, alike, [PARAMS[0]] * 3) == behind


def test_its_pages_are_not_shared(models: Callable[[str], Path]) -> None:
    """Nor are those before the token: attention over a nan that a mask hides has made them nan, too."""
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, BAD]
    with make_llm(models("mha"), max_num_batched_tokens=16) as llm:
        for wanted in (prompt, prompt, [*prompt[:8], 3]):
            (output,) = llm.generate([wanted], SamplingParams(max_tokens=2), use_tqdm=False)
            assert output.num_cached_tokens == 0
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.num_cached_tokens == 8  # another's, who is sound
        assert output.outputs[0].finish_reason == "error"


@pytest.mark.sample(2)
@pytest.mark.parametrize("transport", ["local", "host_loopback", "host_loopback_batched"])
@pytest.mark.parametrize("budget", [None, 4])
def test_the_plain_generate(models: Callable[[str], Path], transport: str, budget: int | None) -> None:
    sizes = {"max_num_seqs": 9, "num_kv_blocks": 40, "block_size": 4}
    with ModelRunner(models("mha"), all2all_backend=transport, experts_backend="grouped", **sizes) as runner:
        clean = [tuple(each.token_ids) for each in generate(runner, PROMPTS, PARAMS, max_num_batched_tokens=budget)]
        for _ in range(2):
            prompts, params = BAD_PROMPTS + PROMPTS, BAD_PARAMS + PARAMS
            check(generate(runner, prompts, params, max_num_batched_tokens=budget), clean)


@pytest.mark.wide
def test_captured_steps(models: Callable[[str], Path]) -> None:
    """A request that becomes nan while its steps are replayed with others, and padding behind them."""
    with make_captured(models("mha"), num_kv_blocks=60) as runner:
        clean = generate(runner, PROMPTS[:2], PARAMS[:2])
        prompts, params = [[5, 6], *PROMPTS[:2]], [NEXT_IS_BAD, *PARAMS[:2]]
        for _ in range(2):
            bad, *good = generate(runner, prompts, params)
            assert (bad.finish_reason, bad.token_ids) == (FinishReason.ERROR, (BAD,))
            assert good == clean
        assert runner.wrapper.statistics().graph_replays > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", ["data_parallel_size", "tensor_parallel_size"])
def test_several_ranks(models: Callable[[str], Path], share: str) -> None:
    with make_llm(models("mha"), enable_expert_parallel=True, **{share: 2}) as llm:
        clean = tokens(llm, PROMPTS, PARAMS)
        check(mixed(llm), clean)
        assert sum(rank.corrupted_requests for rank in llm.statistics.values()) == 5


@pytest.mark.wide
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_draft_that_is_not_finite_is_only_a_wrong_draft(models: Callable[[str], Path], tree: bool) -> None:
    """Every draft is token 0, whose embedding is nan in the model that checks it, too."""
    drafts = {"speculative_algorithm": "draft_model", "speculative_draft_model_path": models("drafts")}
    shape = {"speculative_num_steps": 2}
    if tree:
        shape |= {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    with make_llm(models("mha")) as llm:
        clean = tokens(llm, PROMPTS, PARAMS)
    with make_llm(models("mha"), **drafts, **shape) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == clean
        assert llm.statistics[0].drafted_tokens > 0
        check(mixed(llm), clean)
        assert llm.statistics[0].corrupted_requests == 5
