"""The documents' tables of what each family supports are true: every cell against the code, with a small checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import transformers
from checkpoints import FAMILIES, make_checkpoint
from fp8_checkpoints import blockwise, kept_projections, write_fp8
from repository import ROOT
from torch import nn

from attention import UBatchAttention
from attention.lanes import runs_in_triton
from model_runner import Checkpoint, CheckpointError, ModelConfig, check_tensor_parallel, known_architectures
from model_runner.decoder import sparse_mlp
from model_runner.decoder.base import ExpertParallel
from model_runner.decoder.layers import Projection
from model_runner.graphs.mode import _obstacle
from model_runner.models import DecoderLM
from model_runner.models.registry import read_model
from model_runner.parallel.transport import make_transport
from model_runner.settings import refuse_trees
from model_runner.weights.quantization import read_quantization
from moe.experts import registry
from ubatch import ConfigError

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
