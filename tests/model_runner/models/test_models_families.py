"""Single families beyond what all of them promise (`test_model_conformance`), against transformers.

And the documents' tables of what each family supports: every cell against the code, with a small checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import transformers
from checkpoints import (
    FAMILIES,
    TINY,
    checkpoint_fixture,
    load_reference,
    make_checkpoint,
    reference_greedy,
    reference_logits,
    with_tensors,
)
from fp8_checkpoints import blockwise, kept_projections, write_fp8
from model_checks import (
    PROMPTS,
    admitted,
    all_logits,
    check_prefill,
    close,
    expected_logits,
    prefill_logits,
    prompt_logits,
)
from repository import ROOT, TINY_MOE
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attention import UBatchAttention
from attention.lanes import runs_in_triton
from model_runner import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    ModelRunner,
    SamplingParams,
    ScheduledRequest,
    build_input_batch,
    check_tensor_parallel,
    generate,
    known_architectures,
)
from model_runner.decoder import sparse_mlp
from model_runner.decoder.base import ExpertParallel
from model_runner.decoder.layers import Projection
from model_runner.graphs.runner_graphs import _obstacle
from model_runner.models import DecoderLM
from model_runner.models.registry import read_model
from model_runner.parallel.expert_parallel import make_transport
from model_runner.settings import refuse_trees
from model_runner.weights.quantization import read_quantization
from moe.experts import registry
from ubatch import ConfigError

KIMI_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 32.0, "original_max_position_embeddings": 8},
    **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def test_a_model_in_bf16_stays_near_its_reference(tmp_path: Path) -> None:
    """Compute in bf16, of a checkpoint in bf16: near the fp32 model, and the gate is not rounded."""
    path = make_checkpoint(tmp_path, "DeepseekV3", dtype=torch.bfloat16)
    with ModelRunner(path, num_kv_blocks=64, dtype=torch.bfloat16) as runner:
        mlp: Any = runner.model.get_submodule("layers.1.mlp")
        assert (mlp.gate_dtype, mlp.correction_bias.dtype) == (torch.float32, torch.float32)
        assert mlp.kernel.experts.dtype == torch.bfloat16
        assert runner.kv_cache.spec.dtype == torch.bfloat16
        got = prompt_logits(runner)
    wanted = expected_logits(path)
    error = (got.float() - wanted).abs()
    assert error.median() < 0.02 * wanted.abs().max()  # a token that bf16 sends to another expert may be far off


def test_experts_in_one_tensor_are_those_stored_one_by_one(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen3_5Moe")
    weights = load_file(path / "model.safetensors")
    by_layer: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        layer, experts, rest = name.partition(".experts.")
        if experts:
            by_layer.setdefault(layer, {}).setdefault(rest.split(".")[1], []).append(weights[name])
    assert by_layer
    stacked = {name: w for name, w in weights.items() if ".experts." not in name}
    for layer, kinds in by_layer.items():
        gate, up, down = (torch.stack(kinds[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        stacked |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), dim=1), f"{layer}.experts.down_proj": down}
    wanted = expected_logits(path)
    save_file(stacked, path / "model.safetensors")
    close(prefill_logits(path), wanted)


def test_gpt_oss_runs_on_experts_that_have_biases(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "GptOss")
    with ModelRunner(path, num_kv_blocks=8) as runner:
        assert runner.experts_backend == "grouped"
    with pytest.raises(ConfigError, match="experts back end 'native' has no biases"):
        ModelRunner(path, num_kv_blocks=8, experts_backend="native")


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    """Its config names a model type of its own, and code that is not run; the architecture is DeepSeek-V3's."""
    overrides = {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    theirs = make_checkpoint(tmp_path / "deepseek", "DeepseekV3", rope_parameters=KIMI_ROPE, **overrides)
    path = shutil.copytree(theirs, tmp_path / "kimi")
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    (path / "config.json").write_text(json.dumps(config))
    close(prefill_logits(path), expected_logits(theirs))


def test_deepseek_keeps_one_latent_per_token(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "DeepseekV2")
    with ModelRunner(path, num_kv_blocks=8) as runner:
        assert runner.kv_cache.spec.numbers_per_token == TINY["kv_lora_rank"] + TINY["qk_rope_head_dim"]


@pytest.mark.parametrize("own", [True, False])
def test_tied_embeddings_and_an_output_layer_in_the_checkpoint(own: bool, tmp_path: Path) -> None:
    """transformers ties them only if they are equal; fine-tuned checkpoints may have both, and say they are tied."""
    path = make_checkpoint(tmp_path, "Qwen2", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    with_tensors(path, {"lm_head.weight": torch.randn_like(embedding) if own else embedding.clone()})
    check_prefill(path)
    with ModelRunner(path, num_kv_blocks=1) as runner:
        assert isinstance(runner.model, DecoderLM)
        assert (runner.model.lm_head is runner.model.embed_tokens) is not own


# -- Qwen3-MoE ---------------------------------------------------------------------------------------------------------


checkpoint = checkpoint_fixture(make_checkpoint, "Qwen3Moe")


def test_chunks_and_mixed_steps_change_nothing(checkpoint: Path) -> None:
    """A long prompt in chunks while another request decodes, against each alone."""
    reference = load_reference(checkpoint)
    long, short = list(range(3, 80)), [9, 9, 4]
    answers, _ = reference_greedy(reference, short, 6)
    with ModelRunner(checkpoint, num_kv_blocks=64, block_size=4) as runner:
        chunked, decoding = admitted(runner, [long, short], 90)
        parts = [all_logits(runner, [ScheduledRequest(decoding, 3)])]
        decoding.advance(3, int(parts[0][-1].argmax()))
        for length in (30, 1, 46):
            logits = all_logits(runner, [ScheduledRequest(chunked, length), ScheduledRequest(decoding, 1)])
            parts.append(logits[:length])
            chunked.advance(length, None)
            decoding.advance(1, int(logits[-1].argmax()))
        assert decoding.output_token_ids == answers[:4]
        close(torch.cat(parts[1:]), reference_logits(reference, long))


def test_older_config_names(checkpoint: Path, tmp_path: Path) -> None:
    """Before transformers 5: `rope_theta`, `num_experts`, and the end-of-sequence token of the generation config."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts")
    del config["head_dim"], config["mlp_only_layers"]
    config["head_dim"] = 16
    config["mlp_only_layers"] = [1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 110]}')
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with ModelRunner(checkpoint, num_kv_blocks=8) as new, ModelRunner(tmp_path, num_kv_blocks=8) as old:
        assert old.config == replace(new.config, eos_token_ids=(7, 110))
        params = SamplingParams(max_tokens=12)
        long = generate(new, [PROMPTS[0]], params)[0].token_ids
        short = generate(old, [PROMPTS[0]], params)[0].token_ids
        assert short == long[: len(short)]


@pytest.mark.long
def test_committed_example_model() -> None:
    """The trained checkpoint that the examples use."""
    reference = load_reference(TINY_MOE)
    prompts = [[40, 300, 7, 12, 99, 250, 31], [511, 18, 1000, 3]]
    check_prefill(TINY_MOE, prompts)
    with ModelRunner(TINY_MOE, num_kv_blocks=64) as runner:
        outputs = generate(runner, prompts, SamplingParams(max_tokens=33, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference_greedy(reference, prompt, 33, output.token_ids)[0]


def test_a_model_without_a_plan_is_refused(checkpoint: Path) -> None:
    with ModelRunner(checkpoint, num_kv_blocks=8) as runner, pytest.raises(ConfigError, match="attention plan"):
        runner.model(torch.tensor([1, 2]), torch.tensor([0, 1]))


def test_padding_rows_reach_no_expert_and_no_cache(checkpoint: Path) -> None:
    """A batch padded at its end: the tokens' logits are the same, and the cache is untouched by the padding."""
    with ModelRunner(checkpoint, num_kv_blocks=8) as runner:
        (request,) = admitted(runner, [PROMPTS[0]])
        with torch.inference_mode():
            batch = build_input_batch([ScheduledRequest(request, 7)], runner.request_table, runner.kv_cache.spec)
            agreed = runner.agree(batch)
            plain = runner.forward(agreed)
            before = runner.kv_cache.keys(0).clone()
            pad = torch.nn.functional.pad
            padded = replace(
                agreed,
                input_ids=pad(batch.input_ids, (0, 3), value=77),
                positions=pad(batch.positions, (0, 3)),
                metadata=replace(batch.metadata, slot_mapping=pad(batch.metadata.slot_mapping, (0, 3), value=-1)),
            )
            routed: list[Tensor] = []
            kernel = runner.model.get_submodule("layers.0.mlp.kernel")
            kernel.register_forward_pre_hook(lambda module, args: routed.append(args[2]))
            torch.testing.assert_close(runner.forward(padded), plain, atol=1e-6, rtol=1e-5)
            assert routed[0][:7].min() >= 0
            assert routed[0][7:].tolist() == [[-1] * 3] * 3
            assert torch.equal(runner.kv_cache.keys(0), before)


BLOCK = (4, 4)
NEVER = re.compile(r"embed_tokens|lm_head|\.gate$")
"""Projections that no family keeps in fp8."""
Cells = dict[str, str]


def tables(document: str) -> Iterator[list[Cells]]:
    """The tables of a document about families: a row each, by the names of the columns."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for table in re.findall(r"^\| family \|.*\n(?:\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines())
        yield [dict(zip(head, row, strict=True)) for row in rows]


(TABLE,) = tables("docs/serving.md")
ROWS = {row["`architectures` of its config"].strip("`"): row for row in TABLE}


def loaded(path: Path, block: tuple[int, int] | None = None) -> nn.Module:
    """The model of one rank; what can stay in fp8 does, if a block is given."""
    checkpoint = Checkpoint(path)
    checkpoint.projection_block = block
    kind, config = read_model(checkpoint)
    parallel = ExpertParallel(make_transport(None, None, None, config.num_experts), fp8_block=block)
    return kind.load(config, checkpoint, parallel)


def refused(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except (ConfigError, CheckpointError):
        return True
    return False


def stays_in_fp8(path: Path) -> str:
    """What a GPU would keep in fp8."""
    with mock.patch.object(sparse_mlp, "load_fp8_experts", return_value=None) as asked:
        model = loaded(path, BLOCK)
    every = [name for name, each in model.named_modules() if isinstance(each, Projection) and not NEVER.search(name)]
    kept = kept_projections(model)
    assert set(kept) <= set(every)
    return ("experts, " if asked.called else "") + ("projections" if len(kept) == len(every) else "some projections")


def graphs_of(config: ModelConfig) -> str:
    """Whether a GPU can capture steps of the family, with the best back ends for them."""
    linear = config.linear is None or runs_in_triton(torch.device("cuda"))
    plan = cast(UBatchAttention, SimpleNamespace(linear_capturable=linear, capturable=True))
    without = refused if config.biased_experts else lambda *_: False
    takes = [name for name in registry._BACKENDS.names() if not without(registry.check_takes_biases, name)]
    captured = any(registry.experts_class(name).capturable for name in takes)
    return "yes" if _obstacle(nn.Module(), plan) is None and captured else "no"


def drafts_of(family: str) -> str:
    """`yes` if transformers has a layer to leave out in the family's published checkpoints, and we load it."""
    if family == "MiMoV2Flash":  # several layers in a form of their own: skipped, as its model file says
        return "no"
    left_out = getattr(transformers, f"{family}ForCausalLM")._keys_to_ignore_on_load_unexpected or ()
    return "yes" if any(re.search(r"mtp|layers", name) for name in left_out) else "no"


@pytest.mark.long
@pytest.mark.wide_sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_is_true(family: str, tmp_path: Path) -> None:
    row = ROWS[f"{family}ForCausalLM"]
    path = make_checkpoint(tmp_path / "plain", family)
    fp8, meant = write_fp8(path, tmp_path, blockwise(*BLOCK))
    kind, config = read_model(Checkpoint(path))
    hybrid, sparse = bool(config.linear_layers), config.num_experts > 0
    mxfp4 = {**Checkpoint(path).config.values, "quantization_config": {"quant_method": "mxfp4"}}
    read, plain = (loaded(each).state_dict() for each in (fp8, meant))
    same = read.keys() == plain.keys() and all(torch.equal(read[name], plain[name]) for name in plain)
    decoder = issubclass(kind, DecoderLM)
    found = {
        "lanes": "yes",  # compared with transformers in `test_model_conformance`
        "DP + EP": "yes" if sparse else "dense",
        "`-tp`": "no" if refused(check_tensor_parallel, config, 2) else "yes",
        "CUDA graphs": graphs_of(config),
        "n-grams": "yes",  # they need a verify step, which lanes need, too
        "EAGLE": "no"
        if not decoder
        else "chains"
        if refused(refuse_trees, len(config.linear_layers), True)
        else "trees",
        "MTP": drafts_of(family),
        "prefix cache": "snapshots" if hybrid else "pages",
        "fp8 on a CPU": "no" if not same else "not experts" if config.biased_experts else "yes",
        "stays fp8 on a GPU": stays_in_fp8(fp8),
        "MXFP4": "no" if refused(read_quantization, with_values(path, mxfp4)) else "experts",
    }
    assert {name: row[name] for name in found} == found
    assert len(row) == len(found) + 2


def with_values(path: Path, values: dict[str, Any]) -> Any:
    config = Checkpoint(path).config
    return type(config)(values, config.path)


def test_rows_are_of_what_can_be_loaded_and_the_readme_says_the_same() -> None:
    assert set(known_architectures()) <= set(ROWS)
    seen = ROWS["Qwen3_5MoeForConditionalGeneration"], ROWS["Qwen3_5MoeForCausalLM"]
    assert [list(row.values())[2:] for row in seen[:1]] == [list(row.values())[2:] for row in seen[1:]]
    assert {name.removesuffix("ForCausalLM") for name in ROWS} - set(FAMILIES) == {"Qwen3_5MoeForConditionalGeneration"}
    of_family = {name: row for row in TABLE for name in row["family"].split(", ")}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (listed,) = re.findall(r"It serves (.*?)\. `docs/serving\.md` has what each supports", readme)
    named = listed.split(", ")
    whole = set(of_family) - {"its text model", "of a checkpoint that can see"}
    assert sorted(named) == sorted(whole)
