"""The part of `ubatch bench attention` that runs whole models: our runner against transformers' `generate`.

One process, all cores, the same checkpoint, prompts and number of new tokens, greedy; the tokens are compared first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, generate, make_random_qwen3_moe, split_cost
from moe import linear
from serving.llm import LLM
from serving.offline.outputs import CompletionOutput
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_arms, timed
from ubatch import UBatchConfig, UBatchError
from ubatch.process import num_cores

_PROMPTS, _PROMPT_LEN, _NEW = 64, 128, 64
_BUDGET = 2048  # prompt tokens per step, so that a step's tensors are kept by the C library when they are freed


@dataclass(frozen=True)
class GenerateResult:
    """Figures of whole generations.

    Attributes:
        speedup: transformers' time / our time.
        gflops_limit: GFLOP/s of one large matrix product on these cores.
        arithmetic_share: time of the model's operations at that limit, as a share of our time.
        where: kind of operation -> share of our CPU time.
        same_tokens: share of the new tokens that equal transformers'.
    """

    arms_ms: Mapping[str, Sequence[float]]
    tokens_per_s: Interval
    speedup: Interval
    gflops_limit: float
    arithmetic_share: Interval
    where: Mapping[str, float]
    same_tokens: float

    def print(self) -> None:
        print(f"generate: {_PROMPTS} prompts x {_PROMPT_LEN} tokens, {_NEW} new, 100 M Qwen3-MoE, all cores")
        print_arms(self.arms_ms, ".0f")
        print(f"  new tokens per second   {self.tokens_per_s:.0f}")
        print(f"  speed-up over transformers   {self.speedup:.3f}   (same tokens: {self.same_tokens:.1%})")
        print(f"  share of the arithmetic limit ({self.gflops_limit:.0f} GFLOP/s)   {self.arithmetic_share:.3f}")
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.where.items())
        print(f"  where the CPU time goes: {parts}")


def measure_generate(folder: Path, blocks: int) -> GenerateResult:
    """Make the checkpoint in `folder`, run both arms, and compare them."""
    torch.set_num_threads(num_cores())
    path = folder / "random-qwen3-moe"
    make_random_qwen3_moe(path, seed=0)
    with ModelRunner(path, dbo=UBatchConfig(enable_dbo=False), max_num_seqs=_PROMPTS) as runner:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, runner.config.vocab_size, (_PROMPTS, _PROMPT_LEN), generator=generator)

        def ours() -> list[Sequence[int]]:
            params = SamplingParams(max_tokens=_NEW, ignore_eos=True)
            outputs = generate(runner, prompts.tolist(), params, max_num_batched_tokens=_BUDGET)
            return [output.token_ids for output in outputs]

        theirs = transformers_arm(path, prompts, _NEW)
        same = share_of_equal("ubatch", theirs().tolist(), ours())
        arms = {"ubatch": timed(ours), "transformers": timed(theirs)}
        measured = interleave_arms(arms, blocks, label="generate")
        where = _breakdown(ours)
        limit = _gemm_flops()
        cost = split_cost(runner.model)
        logits = 2.0 * runner.config.hidden_size * runner.config.vocab_size * _NEW
        operations = _PROMPTS * (cost.of(_PROMPT_LEN + _NEW - 1, 0) + logits)
    ours_ms = measured["ubatch"]
    return GenerateResult(
        arms_ms=measured,
        tokens_per_s=bootstrap([_PROMPTS * _NEW / value * 1e3 for value in ours_ms]),
        speedup=paired(measured["transformers"], ours_ms),
        gflops_limit=limit / 1e9,
        arithmetic_share=bootstrap([operations / limit / value * 1e3 for value in ours_ms]),
        where=where,
        same_tokens=same,
    )


def completions(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[CompletionOutput]:
    """The model's greedy completion of each prompt, of `new_tokens` tokens."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return [each.outputs[0] for each in llm.generate(list(prompts), params, use_tqdm=False)]


def share_of_equal(name: str, expected: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Share of equal elements. Not all need be: a random model has near-ties, and a tie that falls differently changes
    all later tokens.

    Raises:
        UBatchError: less than half are equal.
    """
    pairs = [pair for a, b in zip(expected, got, strict=True) for pair in zip(a, b, strict=True)]
    same = sum(a == b for a, b in pairs) / len(pairs)
    if same < 0.5:
        raise UBatchError(f"{name} generates something else: only {same:.1%} is the same.")
    return same


def transformers_arm(model: Path, prompts: Tensor, new_tokens: int) -> Callable[[], Tensor]:
    """A function that calls transformers' greedy `generate` for prompts `[prompts, tokens]` of a checkpoint; it returns
    the new tokens `[prompts, new_tokens]`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate() -> Tensor:
        with torch.inference_mode():
            out = reference.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return torch.as_tensor(out)[:, prompts.shape[1] :]

    return generate


def _gemm_flops() -> float:
    """Floating-point operations per second of one large matrix product, by the fastest library installed."""
    a, b = torch.randn(2, 2048, 2048)
    arms = [timed(partial(multiply, a, b)) for multiply in (linear, torch.nn.functional.linear)]
    with torch.inference_mode():
        return 2 * 2048**3 / min(arm() for arm in arms * 7) * 1e3


_KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "linear", "mkldnn", "onednn"),
    "attention": ("scaled_dot_product", "flash_attention", "decode"),
    "gather and scatter": ("index", "gather", "scatter", "cat", "copy", "sort", "embedding", "segment"),
}


def _breakdown(arm: Callable[[], object]) -> dict[str, float]:
    """Share of the operators' own CPU time by kind, from one profiled run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        arm()
    shares = dict.fromkeys([*_KINDS, "everything else"], 0.0)
    for event in profile.key_averages():
        name = event.key.removeprefix("aten::")
        kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "everything else")
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items()}
