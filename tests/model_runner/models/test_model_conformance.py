"""What every model family promises; a family is tested by being registered.

Of each registered architecture transformers makes a tiny random checkpoint (`checkpoints.FAMILIES`). Our loader reads
it, and its logits are compared with transformers' in every kind of step: prefills and decode, in one lane and in
several, in chunks, behind a cached prefix, over ranks that share experts or attention. Random configs open what else it
can say. At the end families that are broken on purpose show that the comparisons see it.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import model_checks
import pytest
import torch
from checkpoints import (
    FAMILIES,
    LATENT_ROPE,
    family_checkpoints_fixture,
    load_reference,
    make_checkpoint,
    reference_greedy,
    reference_logits,
    with_tensors,
)
from model_checks import admitted, all_logits, check_decode, check_overlap, check_prefill, close
from random_models import random_fields
from safetensors.torch import load_file
from tensor_parallel_steps import EAGER, check_logits, hidden_share, play_all
from torch import Tensor

from model_runner import (
    Checkpoint,
    CheckpointError,
    ModelRunner,
    SamplingParams,
    ScheduledRequest,
    TensorMissing,
    TensorsUnread,
    check_tensor_parallel,
    generate,
    known_architectures,
    model_class,
)
from model_runner.models import DecoderConfig, DecoderLM
from model_runner.models.registry import read_model
from model_runner.weights.files import HFConfig
from moe import EmulatedLink
from ranks import run_ranks
from serving import LLM
from ubatch import CommGroup, ConfigError, DeclineReason, Schedule, UBatchConfig, tracing

LONG = pytest.mark.long
SEEDS = 10
PARTS = {"Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM"}
"""Architectures of larger models, of which another one is all that runs; see `test_hybrids`."""
PROMPTS = [[5, 17, 99, 3, 42, 42, 8], [1], list(range(20, 61))]
BF16 = {"max_shard_size": "30KB", "dtype": torch.bfloat16}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}

each_family = pytest.mark.parametrize("family", FAMILIES)


checkpoint = family_checkpoints_fixture()


def test_every_architecture_is_a_family_or_runs_as_one() -> None:
    named = {f"{family}ForCausalLM" for family in FAMILIES}
    assert named | set(PARTS) == set(known_architectures())
    assert set(PARTS.values()) <= named


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.wide_sample(1)
@LONG
@pytest.mark.sample(3)
@each_family
def test_every_step_equals_transformers(checkpoint: Callable[[str], Path], family: str) -> None:
    assert check_decode(checkpoint(family)) == 0


@LONG
@pytest.mark.sample(3)
@each_family
def test_lanes_change_nothing(checkpoint: Callable[[str], Path], family: str) -> None:
    """Handing on at every point there is, in dense layers too."""
    check_overlap(checkpoint(family), Schedule("every_point", points_off=frozenset()))


@LONG
@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "two_batch_prefill", "two_batch_decode"])
def test_shared_experts_may_run_at_every_place(checkpoint: Callable[[str], Path], schedule: str) -> None:
    check_overlap(checkpoint("DeepseekV3"), schedule)


@LONG
@pytest.mark.sample(3)
@each_family
def test_chunks_of_prompts_and_drafts(checkpoint: Callable[[str], Path], family: str) -> None:
    """A prompt behind a part of it that is in the cache, as a shared prefix is, and a step that verifies drafts."""
    prompt, drafts = list(range(40, 63)), (9, 100, 77)
    logits = reference_logits(load_reference(checkpoint(family)), [*prompt, 5, *drafts])
    with ModelRunner(checkpoint(family), num_kv_blocks=32, num_speculative_tokens=3) as runner:
        (request,) = admitted(runner, [prompt])
        for end in (7, 8, 23):
            share = ScheduledRequest(request, end - request.num_computed_tokens)
            first = request.num_computed_tokens
            close(all_logits(runner, [share]), logits[first:end])
            request.advance(share.num_tokens, 5 if end == len(prompt) else None)
        close(all_logits(runner, [ScheduledRequest(request, 1, drafts)]), logits[len(prompt) :])


@LONG
@pytest.mark.sample(3)
@each_family
def test_a_prefix_comes_from_the_cache(checkpoint: Callable[[str], Path], family: str) -> None:
    """Pages of keys and values, or the snapshot of a recurrent state."""
    path, stem = checkpoint(family), list(range(30, 71))
    reference, prompts = load_reference(path), [[*stem, 7, 9], [*stem, 8], [3, *stem]]
    answers = [reference_greedy(reference, prompt, 6)[0] for prompt in prompts]
    room: dict[str, Any] = {"kv_cache_memory": 1 << 20, "block_size": 4}
    with LLM(path, dtype="float32", skip_tokenizer_init=True, **room) as llm:
        for cached in ([0, 40, 0], [40, 40, 40]):
            outputs = [llm.generate(prompt, SamplingParams(max_tokens=6), use_tqdm=False)[0] for prompt in prompts]
            assert [list(output.outputs[0].token_ids) for output in outputs] == answers
            found = [output.num_cached_tokens for output in outputs]
            assert found == cached or (read_model(Checkpoint(path))[1].linear_layers and found[0] == cached[0])


@LONG
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": None}),
        ("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
        ("Llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}, "num_key_value_heads": 1, **BF16}),
        ("Qwen2", {"rope_parameters": YARN, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("Qwen2", {**WINDOW, "max_window_layers": 0, **BF16}),
        ("Qwen2Moe", {"qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 7, "num_key_value_heads": 4, **BF16}),
        ("Qwen2Moe", WINDOW),
        ("Qwen3", {"attention_bias": True, "rope_parameters": YARN, "rms_norm_eps": 1e-3}),
        ("Qwen3", {**WINDOW, "max_window_layers": 2}),
        ("Qwen3", {**WINDOW, "max_window_layers": 0, **BF16}),
        ("Qwen3Moe", {"mlp_only_layers": [], "decoder_sparse_step": 2, "tie_word_embeddings": True}),
        ("Qwen3Moe", {"norm_topk_prob": False, "num_experts_per_tok": 1, "num_key_value_heads": 4}),
        ("Qwen3Moe", {"attention_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
        ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 6, **BF16}),
        ("Qwen3Moe", WINDOW),
        ("Qwen3Next", {"mlp_only_layers": [1], "layer_types": None, "full_attention_interval": 3}),
        ("Qwen3Next", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "num_key_value_heads": 1, **BF16}),
        ("Qwen3_5Moe", {"linear_num_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True, **BF16}),
        ("Mistral", {"sliding_window": 5, "tie_word_embeddings": True, **BF16}),
        ("Olmoe", {"clip_qkv": 0.5, "num_key_value_heads": 4, "norm_topk_prob": True, **BF16}),
        ("GptOss", {"attention_bias": False, "layer_types": ["full_attention"] * 3, "num_key_value_heads": 4, **BF16}),
        ("Glm4Moe", {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 3, **BF16}),
        ("GraniteMoe", {"attention_bias": True, "tie_word_embeddings": True, **BF16}),
        ("GraniteMoeShared", {"num_key_value_heads": 1, "rope_parameters": YARN, **BF16}),
        ("MiMoV2Flash", BF16),
        ("Mixtral", {"sliding_window": 5, "num_experts_per_tok": 1, "head_dim": None}),
        ("Mixtral", {"rope_parameters": None, "tie_word_embeddings": True, **BF16}),
        ("DeepseekV2", {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": None}),
        ("DeepseekV2", {"attention_bias": True, "rope_parameters": PLAIN, "n_shared_experts": 1, **BF16}),
        ("DeepseekV2", {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0, "rms_norm_eps": 1e-2}),
        ("DeepseekV3", {"norm_topk_prob": False, "rope_interleave": False, "attention_bias": True}),
        ("DeepseekV3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "rope_parameters": PLAIN}),
        ("DeepseekV3", {"n_routed_experts": 16, "topk_group": 1, "q_lora_rank": None, **BF16}),
        ("DeepseekV3", {"rope_parameters": {**LATENT_ROPE, "mscale_all_dim": 0.0}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_a_config_can_say(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Every branch that an entry opens."""
    check_prefill(make_checkpoint(tmp_path, family, **overrides))


@pytest.mark.wide_sample(8)
@LONG
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(SEEDS))
@each_family
def test_random_configs(family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "DECODE_STEPS", 6)
    path = make_checkpoint(tmp_path, family, seed=seed, **random_fields(family, seed))
    for dbo in (UBatchConfig(enable_dbo=False), UBatchConfig(**EAGER, require_overlap=True)):
        check_prefill(path, PROMPTS, dbo=dbo)
        assert check_decode(path, PROMPTS, dbo=dbo) == (7 if dbo.enable_dbo else 0)


# -- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'.*not supported"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope.* is .*'dynamic'"),
    *(
        ({name: None}, f"has no '{name}'")
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    ),
]


@each_family
def test_configs_that_cannot_be(checkpoint: Callable[[str], Path], family: str) -> None:
    """Refused by the entry's name, before any weight is read."""
    values = json.loads((checkpoint(family) / "config.json").read_text())
    kind, generation = model_class(f"{family}ForCausalLM"), HFConfig({}, Path("generation_config.json"))
    config = kind.read_config(HFConfig(values, Path("config.json")), generation)
    assert isinstance(config, DecoderConfig)
    assert (config.moe is None) == (config.num_experts == 0) == (config.num_experts_per_tok == 0)
    for changes, message in REFUSED:
        with pytest.raises(CheckpointError, match=message):
            kind.read_config(HFConfig({**values, **changes}, Path("config.json")), generation)


@pytest.mark.long
@pytest.mark.wide_sample(3)
@each_family
def test_a_checkpoint_is_read_whole(checkpoint: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    """All that transformers writes is read; a tensor that is missing, and one too many, are refused by name."""
    path = checkpoint(family)
    read_model(Checkpoint(path))
    tensors = load_file(path / "model.safetensors")
    with pytest.raises(TensorsUnread, match=f"{family}ForCausalLM") as unread:
        read_model(Checkpoint(with_tensors(path, {"model.layers.1.strange": torch.zeros(1)}, tmp_path)))
    assert unread.value.names == ("model.layers.1.strange",)
    needed = [name for name in tensors if "layers." not in name or "layers.1." in name]
    for name in (each for each in needed if ".experts." not in each or ".experts.7." in each):
        with pytest.raises(TensorMissing) as caught:
            read_model(Checkpoint(with_tensors(path, {name: None}, tmp_path)))
        assert name in str(caught.value)


# -- ranks ------------------------------------------------------------------------------------------------------------

NUM_TOKENS = 8
THREE = UBatchConfig(num_ubatches=3, dbo_decode_token_threshold=3, dbo_prefill_token_threshold=3)
ARMS: dict[str, dict[str, Any]] = {
    "off": {"dbo": UBatchConfig(enable_dbo=False)},
    "five stages": {"dbo": UBatchConfig(**EAGER, schedule="two_batch_decode")},
    "three lanes": {"dbo": THREE},
    "single": {"dbo": UBatchConfig(**EAGER, schedule="single_batch")},
}
OTHER_ARMS: dict[str, dict[str, Any]] = {
    "gathered": {"dbo": UBatchConfig(**EAGER), "all2all_backend": "allgather_reducescatter"},
    "never cut": {"dbo": UBatchConfig(**EAGER, tbo_token_distribution_threshold=0)},
    "link": {"dbo": UBatchConfig(**EAGER), "link": EmulatedLink(1e-4, 1e9)},
}
"""For one family: what its layers have no part in."""
GROUPS = [tuple(FAMILIES)[number::4] for number in (1, 0, 2, 3)]
"""Families whose checkpoints the same ranks run; the first group has one of each kind of attention and of experts."""


def arms_of(family: str) -> dict[str, dict[str, Any]]:
    return ARMS | (OTHER_ARMS if family == "Qwen3Moe" else {})


def prompts_of(rank: int) -> list[list[int]]:
    """One long request makes rank 0 cut it."""
    rng = random.Random(rank)
    return [[rng.randrange(131) for _ in range(length)] for length in ((5, 40, 2, 9) if rank == 0 else (4, 7, 3))]


def tokens_of(rank: int) -> int:
    """Rank 1 is done early, and idle from then on."""
    return NUM_TOKENS - 3 * rank


def generate_in_all_arms(rank: int, world_size: int, paths: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    group = CommGroup.from_process_group(timeout_s=30)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for family, path in paths.items():
        for name, arm in arms_of(family).items():
            with ModelRunner(path, group=group, num_kv_blocks=96, block_size=4, **arm) as runner, tracing() as trace:
                logits: list[Tensor] = []
                compute = runner.model.compute_logits

                def record(hidden: Tensor, compute: Any = compute, logits: list[Tensor] = logits) -> Tensor:
                    logits.append(compute(hidden))
                    return logits[-1]

                runner.model.compute_logits = record  # type: ignore[method-assign]
                outputs = generate(runner, prompts_of(rank), SamplingParams(max_tokens=tokens_of(rank)))
                runner.allocator.check(idle=True)
                kernels = [layer.mlp.kernel for layer in runner.model.layers if hasattr(layer.mlp, "kernel")]
                seen = runner.statistics()
                results[family, name] = {
                    "tokens": [list(output.token_ids) for output in outputs],
                    "logits": [step.numpy() for step in logits if len(step)],
                    "steps": (seen.calls, seen.engaged, seen.engaged_single),
                    "declined": dict(seen.declined),
                    "hidden": hidden_share(trace.spans, names=None),
                    "held": {tuple(kernel.experts.expert_range) for kernel in kernels},
                }
    return results


@pytest.mark.ranks
@pytest.mark.parametrize(
    "families", [GROUPS[0], *(pytest.param(own, marks=pytest.mark.slow) for own in GROUPS[1:])], ids=" ".join
)
def test_two_ranks_equal_transformers(families: Sequence[str], tmp_path: Path) -> None:
    """DP 2 + EP 2, DP 2 alone where there are no experts: tokens and logits, overlapped and not."""
    paths = {family: make_checkpoint(tmp_path / family, family) for family in families}
    references = {family: load_reference(path) for family, path in paths.items()}
    ranks = run_ranks(generate_in_all_arms, 2, {family: str(path) for family, path in paths.items()})
    for rank, results in enumerate(ranks):
        for family, reference in references.items():
            got = results[family, "off"]["tokens"]
            prompts = zip(prompts_of(rank), got, strict=True)
            expected = [reference_greedy(reference, prompt, tokens_of(rank), guess) for prompt, guess in prompts]
            for name, settings in arms_of(family).items():
                arm, what, dbo = results[family, name], (family, name, rank), settings["dbo"]
                assert arm["tokens"] == [tokens for tokens, _ in expected], what
                assert len(arm["logits"]) == tokens_of(rank), what
                for step, logits in enumerate(arm["logits"]):
                    wanted = torch.stack([steps[step] for _, steps in expected])
                    assert (torch.from_numpy(logits) - wanted).abs().max() < 1e-4, (*what, step)
                lanes = dbo.enable_dbo and name != "single"
                engaged = (NUM_TOKENS * lanes, NUM_TOKENS * (name == "single"))
                assert arm["steps"] == (NUM_TOKENS, *engaged), (*what, arm["declined"])
                assert dbo.enable_dbo or arm["declined"] == {DeclineReason.DISABLED: NUM_TOKENS}
                sparse = read_model(Checkpoint(paths[family]))[1].num_experts > 0
                assert (arm["hidden"] > 0) == (sparse and lanes), what
                assert arm["held"] == ({tuple(range(4 * rank, 4 * rank + 4))} if sparse else set())


def shares_attention(path: Path) -> bool:
    try:
        check_tensor_parallel(read_model(Checkpoint(path))[1], 2)
    except ConfigError:
        return False
    return True


@pytest.mark.ranks
@pytest.mark.slow
@each_family
def test_two_ranks_share_attention(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """TP 2, of the small checkpoint and of random configs; `test_tensor_parallel_ranks` looks closer."""
    paths = {"small": str(checkpoint(family))}
    for seed in range(SEEDS):
        path = make_checkpoint(tmp_path / f"{seed}", family, seed=seed, **random_fields(family, seed))
        paths[f"{seed}"] = str(path)
    paths = {name: path for name, path in paths.items() if shares_attention(Path(path))}
    assert "small" in paths
    arms = {"off": {}, "two lanes": {"dbo": UBatchConfig(**EAGER)}}
    alone = play_all(0, 1, paths, {"off": {}}, 1, {})
    for rank, results in enumerate(run_ranks(play_all, 2, paths, arms, 2, {})):
        for (name, arm), played in results.items():
            check_logits(played, alone[name, "off"], (family, name, arm, rank))
            assert (played.engaged > 0) == (arm != "off"), (name, played.declined)


# -- families that break the contract ----------------------------------------------------------------------------------


def forget_a_norm(model: Any) -> None:
    model.layers[1].post_attention_norm.data.fill_(1.0)


def forget_the_last_norm(model: Any) -> None:
    model.norm.data.fill_(1.0)


def take_the_next_frequency(model: Any) -> None:
    model.ropes[0].inv_freq.copy_(model.ropes[0].inv_freq.roll(1))


def swap_experts(model: Any) -> None:
    gate = model.layers[0].mlp.gate.weight
    gate.data.copy_(gate.data.roll(1, dims=0))


def swap_gate_and_up(model: Any) -> None:
    gate_up = model.layers[1].mlp.gate_up.weight
    gate_up.data.copy_(torch.cat(gate_up.data.chunk(2)[::-1]))


def forget_a_layer(model: Any) -> None:
    model.layers[2] = model.layers[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [forget_a_norm, forget_the_last_norm, take_the_next_frequency, swap_experts, swap_gate_and_up, forget_a_layer],
)
def test_a_family_that_is_wrong_is_seen(
    fault: Callable[[Any], None], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = DecoderLM.load.__func__  # type: ignore[attr-defined]

    def broken(*args: Any) -> Any:
        model = load(*args)
        if not args[2].names or model.norm.is_meta:  # built from headers, to look at shapes
            return model
        with torch.no_grad():
            fault(model)
        return model

    check_prefill(checkpoint("Qwen3Moe"), PROMPTS, experts_backend="grouped")
    monkeypatch.setattr(DecoderLM, "load", classmethod(broken))
    with pytest.raises(AssertionError):
        check_prefill(checkpoint("Qwen3Moe"), PROMPTS, experts_backend="grouped")
