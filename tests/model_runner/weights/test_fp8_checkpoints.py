"""Checkpoints in fp8: dequantised as they are read, on a CPU, whole or a rank's part.

Quantised weights that cannot be loaded are refused by name, from the config or when the tensor is asked for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, reference_greedy, with_tensors
from fp8_checkpoints import FP8, Kind, blockwise, compressed, dequantize, load_share, one_weight, quantize, write_fp8
from model_checks import PROMPTS, close, expected_logits, prefill_logits
from safetensors.torch import load_file
from step_cases import StepStreamsFake
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from model_runner import Checkpoint, CheckpointError, ModelRunner, SamplingParams, TensorMissing, WrongShape
from model_runner.drafting.network import load_draft
from model_runner.parallel.tensor_parallel import Shard
from model_runner.weights.files import HFConfig
from model_runner.weights.quantization import ScaledBlocks, read_quantization
from model_runner.weights.weight_pass import Wanted, WeightPass
from model_runner.weights.weights import Part
from serving import LLM

E8M0, BYTES = torch.float8_e8m0fnu, torch.uint8
CASES: dict[str, tuple[str, dict[str, Any], Kind]] = {
    "Qwen3": ("Qwen3", {}, blockwise(128, 128, plain=["layers.1.self_attn.o_proj", "layers.2.mlp"])),
    "Qwen3, small blocks": ("Qwen3", {"tie_word_embeddings": True}, blockwise(20, 28, scales=torch.bfloat16)),
    "Qwen3-MoE, shards": ("Qwen3Moe", {"max_shard_size": "60KB"}, blockwise(16, 32, scales=E8M0, scale_fmt="ue8m0")),
    "DeepSeek-V3": ("DeepseekV3", {"attention_bias": True}, blockwise(32, 20)),
    "DeepSeek-V3, bytes": (
        "DeepseekV3",
        {"q_lora_rank": None},
        blockwise(24, 16, scales=torch.uint8, scale_fmt="ue8m0"),
    ),
    "MiMo-V2-Flash": ("MiMoV2Flash", {}, blockwise(16, 20, plain=["layers.1.self_attn.o_proj"])),
    "per tensor": ("Mixtral", {}, Kind({"quant_method": "fp8"}, (0, 0), "_scale", dims=0)),
    "compressed per tensor": ("Llama", {}, compressed("tensor", dims=1, plain=["layers.0.mlp.down_proj"])),
    "compressed per channel": ("Qwen3Moe", {}, compressed("channel", block=(1, 0))),
    "compressed blocks": ("Llama", {}, compressed("block", block=(16, 32))),
}


@pytest.mark.long
@pytest.mark.wide_sample(3)
@pytest.mark.parametrize(("family", "changes", "kind"), CASES.values(), ids=CASES)
def test_logits_are_those_of_the_weights_that_it_means(
    family: str, changes: dict[str, Any], kind: Kind, tmp_path: Path
) -> None:
    path, meant = write_fp8(make_checkpoint(tmp_path / "plain", family, **changes), tmp_path, kind)
    stored = {w.dtype for file in path.glob("*.safetensors") for w in load_file(file).values()}
    assert {FP8, kind.scales} <= stored
    close(prefill_logits(path), expected_logits(meant))


# ---------------------------------------------------------------------------------------------------------- the parts


KINDS = ["Qwen3, small blocks", "compressed per channel", "compressed per tensor"]
PARTS = [
    (Part(0, 41, 82), 90),
    (Part(41, 41, 82), 90),
    (82, Part(30, 30, 90)),
    (82, Part(60, 30, 90)),
    (Part(17, 3, 82), Part(31, 9, 90)),
    (Part(81, 1, 82), Part(89, 1, 90)),
]


@pytest.mark.parametrize("kind", [CASES[name][2] for name in KINDS], ids=KINDS)
def test_parts_are_slices_of_the_whole(kind: Kind, tmp_path: Path) -> None:
    """Wherever they begin and end in a block."""
    stored, scales = quantize(torch.randn(82, 90), kind)
    whole = dequantize(stored, scales, kind)
    path = one_weight(tmp_path, {"w": stored, "w" + kind.suffix: scales.to(kind.scales)}, kind.config)
    for dtype in (torch.float32, torch.bfloat16):
        checkpoint = Checkpoint(path, dtype=dtype)
        assert torch.equal(checkpoint.load("w", 82, 90), whole.to(dtype))
        for rows, columns in PARTS:
            index = tuple(size.slice if isinstance(size, Part) else slice(size) for size in (rows, columns))
            assert torch.equal(checkpoint.load("w", rows, columns), whole[index].to(dtype))
    wide = torch.full((164, 100), 7.0, dtype=torch.bfloat16)
    checkpoint.load_into("w", wide[41:123, 5:95])
    assert torch.equal(wide[41:123, 5:95], whole.bfloat16())
    assert (wide[:, 95:] == 7).all()


@pytest.mark.parametrize("pinned_bytes", [8 * 1024, 8 * 64])
def test_pieces_of_pinned_memory_are_dequantised(pinned_bytes: int) -> None:
    """Some rows of a matrix, or some columns of a row, at a time."""
    kind = blockwise(16, 28)
    stored, scales = quantize(torch.randn(82, 90), kind)
    out = torch.zeros(75, 70, dtype=torch.bfloat16)
    reading = WeightPass(torch.device("cpu"), StepStreamsFake(), pinned_bytes=pinned_bytes)
    reading.want(Wanted("file", ScaledBlocks(stored, scales, (16, 28))[3:78, 11:81], out))
    reading.run()
    assert torch.equal(out, dequantize(stored, scales, kind)[3:78, 11:81].bfloat16())


def test_every_number_of_fp8_is_itself() -> None:
    """Smallest and largest ones, both zeros, and NaN, which only a broken checkpoint has."""
    stored = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 16)
    for numbers in (stored, stored[:7], stored[8:15]):
        ScaledBlocks(numbers, torch.full((1, 1), 3.0), (16, 16)).read(out := torch.zeros(numbers.shape))
        assert torch.equal(out.isnan(), numbers.float().isnan())
        assert torch.equal(out.nan_to_num(), numbers.float().nan_to_num() * 3)


@pytest.mark.long
def test_ranks_load_their_own_only(tmp_path: Path) -> None:
    """Experts 4 to 7, and the second half of the heads and the dense MLP; blocks of 20 x 28 fit none of these."""
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "DeepseekV3"), tmp_path, blockwise(20, 28))

    def load(experts: range, shard: Shard) -> tuple[dict[str, Tensor], set[str]]:
        checkpoint: Any = Checkpoint(path)
        read: set[str] = set()
        checkpoint._mapped = lambda name: read.add(name) or Checkpoint._mapped(checkpoint, name)
        return load_share(checkpoint, shard, experts).state_dict(), read

    (whole, _), (part, read) = load(range(8), Shard(0, 1)), load(range(4, 8), Shard(1, 2))
    assert not any(f".experts.{expert}." in name for name in read for expert in range(4))
    cut = 0
    for name, w in part.items():
        expected = whole[name]
        for dim, size in enumerate(w.shape):  # a fused projection has two halves, each cut
            if size != expected.shape[dim]:
                blocks = 2 if "gate_up" in name else 1
                expected = expected.unflatten(dim, (blocks, 2, -1)).select(dim + 1, 1).flatten(dim, dim + 1)
                cut += 1
        assert torch.equal(w, expected), name
    assert cut >= 3 * 4


class Peak(TorchDispatchMode):
    """The most bytes at once of what operations have allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault(StorageWeakRef(storage), storage.nbytes())
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.most = max(self.most, sum(self._alive.values()))
        return result


@pytest.mark.wide
def test_memory_is_that_of_the_result_and_of_one_tensor(tmp_path: Path) -> None:
    kind = blockwise(128, 128)
    stored: dict[str, Tensor] = {}
    for number in range(8):
        stored[f"{number}"], stored[f"{number}_scale_inv"] = quantize(torch.randn(1000, 1500), kind)
    checkpoint = Checkpoint(one_weight(tmp_path, stored, kind.config), dtype=torch.bfloat16)
    for name in stored:
        checkpoint._mapped(name)  # a mapped file is no memory
    with Peak() as peak, checkpoint.one_pass():
        loaded = [checkpoint.load(f"{number}", 1000, 1500) for number in range(8)]
    result = sum(w.nbytes for w in loaded)
    files = sum(w.nbytes for w in stored.values())
    assert result < peak.most
    assert peak.most - files < result + loaded[0].nbytes


# ------------------------------------------------------------------------------------------------------------- beside


@pytest.mark.parametrize("named", [{"dtype": "bfloat16"}, {}], ids=["named", "found"])
def test_the_dtype_is_that_of_what_is_not_quantised(named: dict[str, str], tmp_path: Path) -> None:
    kind = blockwise(1, 2)  # more scales than anything else
    stored, scales = quantize(torch.randn(8, 8), kind)
    tensors = {"norm": torch.ones(8, dtype=torch.bfloat16), "w": stored, "w_scale_inv": scales}
    assert Checkpoint(one_weight(tmp_path, tensors, kind.config, **named)).stored_dtypes() == ("bfloat16",)


@pytest.mark.long
def test_a_layer_for_drafts_is_dequantised_too(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "DeepseekV3", num_hidden_layers=4)
    parts = {f"model.layers.3.{name}.weight": torch.rand(48) for name in ("enorm", "hnorm", "shared_head.norm")}
    parts["model.layers.3.eh_proj.weight"] = torch.randn(48, 96)
    with_tensors(plain, parts, num_hidden_layers=3, num_nextn_predict_layers=1)
    path, meant = write_fp8(plain, tmp_path, blockwise(32, 20))
    drafts = []
    for each in (path, meant):
        with ModelRunner(each, num_kv_blocks=4, experts_backend="grouped") as runner:
            drafts.append(load_draft("mtp", None, runner).state_dict())  # type: ignore[attr-defined]
    assert drafts[0].keys() == drafts[1].keys()
    assert all(torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])


def test_scales_of_the_kv_cache_are_read_beside_those_of_weights(tmp_path: Path) -> None:
    kind = compressed("tensor")
    kind.config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Llama"), tmp_path, kind)
    names = {f"model.layers.{layer}.self_attn.{part}_scale": layer for layer in range(3) for part in "kv"}
    with_tensors(path, {name: torch.tensor(0.25 + layer) for name, layer in names.items()})
    with ModelRunner(path, num_kv_blocks=4, kv_cache_dtype="fp8") as runner:
        assert runner.kv_cache.key_pool.scales == [0.25, 1.25, 2.25]


@pytest.mark.wide
@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Qwen3Next", marks=pytest.mark.slow), "MiMoV2Flash"])
def test_served(family: str, tmp_path: Path) -> None:
    path, meant = write_fp8(make_checkpoint(tmp_path / "plain", family), tmp_path, blockwise(20, 28, scales=E8M0))
    reference = load_reference(meant)
    expected = [reference_greedy(reference, prompt, 6)[0] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory": "8M", "max_num_seqs": 4, "skip_tokenizer_init": True}
    dbo = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    for ranks in ({"data_parallel_size": 2, **dbo}, {"tensor_parallel_size": 2}):
        with LLM(path, dtype="float32", enable_expert_parallel=True, **options, **ranks) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            outcomes = {outcome for rank in llm.statistics.values() for outcome in rank.steps}
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert ("prefill/engaged" in outcomes) == ("enable_dbo" in ranks), outcomes


def drop(ending: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda stored: [stored.pop(name) for name in list(stored) if name.endswith(ending)]


def cut_scales(stored: dict[str, Tensor]) -> None:
    stored["w_scale_inv"] = stored["w_scale_inv"][:-1].contiguous()


def put(**tensors: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda stored: stored.update(tensors)


FP8_CONFIG = blockwise(16, 28).config


@pytest.mark.parametrize(
    ("change", "config", "error", "message"),
    [
        (
            drop("_scale_inv"),
            FP8_CONFIG,
            TensorMissing,
            "'w' is stored in fp8, but its scales 'w_scale_inv' are missing",
        ),
        (cut_scales, FP8_CONFIG, WrongShape, r"'w_scale_inv' has shape \[5, 4\].* asks for \[6, 4\]"),
        (id, blockwise(16, 16).config, WrongShape, r"'w_scale_inv' has shape \[6, 4\].* asks for \[6, 6\]"),
        (id, None, CheckpointError, "float8_e4m3fn .* with scales 'w_scale_inv', but config.json names no"),
        (drop("_scale_inv"), None, CheckpointError, "'w' is stored as float8_e4m3fn .*, but config.json names no"),
        (put(w=torch.ones(82, 90)), FP8_CONFIG, CheckpointError, "'w' is stored as float32 .* with scales"),
        (put(w=torch.ones(82, 90, dtype=torch.int8)), FP8_CONFIG, CheckpointError, "'w' is stored as int8"),
        (put(w=torch.ones(82, 90).to(torch.float8_e5m2)), FP8_CONFIG, CheckpointError, "stored as float8_e5m2"),
        (
            put(w_scale_inv=torch.ones(6, 4, dtype=torch.int8)),
            FP8_CONFIG,
            CheckpointError,
            "scales 'w_scale_inv' are torch.int8",
        ),
        (
            put(w_scale_inv=torch.ones(6, 4, dtype=torch.uint8)),
            FP8_CONFIG,
            CheckpointError,
            "scales 'w_scale_inv' are torch.uint8",
        ),
        (id, compressed("channel", block=(1, 0)).config, TensorMissing, "its scales 'w_scale' are missing"),
        (id, {"quant_method": "awq"}, CheckpointError, r"quant_method 'awq' \(AWQ, integers of 4 bits\), which is not"),
    ],
)
def test_weights_that_cannot_be_dequantised(
    change: Callable[[dict[str, Tensor]], object],
    config: dict[str, Any] | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    stored, scales = quantize(torch.randn(82, 90), blockwise(16, 28))
    tensors = {"w": stored, "w_scale_inv": scales}
    change(tensors)
    with pytest.raises(error, match=message):
        Checkpoint(one_weight(tmp_path, tensors, config)).load("w", 82, 90)


def test_experts_in_fp8_of_three_dimensions_are_refused(tmp_path: Path) -> None:
    stored = {"w": torch.ones(2, 16, 16).to(FP8), "w_scale_inv": torch.ones(2, 1, 1)}
    with pytest.raises(CheckpointError, match=r"'w' is stored as float8_e4m3fn \[2, 16, 16\].* or matrices in float8"):
        Checkpoint(one_weight(tmp_path, stored, FP8_CONFIG)).load("w", 2, 16, 16)


def with_group(**changes: Any) -> dict[str, Any]:
    config = compressed("tensor").config
    config["config_groups"]["group_0"].update(changes)
    return config


def group(**weights: Any) -> dict[str, Any]:
    return with_group(weights=compressed("tensor").config["config_groups"]["group_0"]["weights"] | weights)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"'gptq' \(GPTQ.*not supported\. Weights may be .*Choose a"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' .ModelOpt, such as NVFP4"),
        ({"quant_method": "mxfp4"}, "'mxfp4' .MXFP4"),
        ({"quant_method": "new"}, "quant_method 'new', which is not supported"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "quantization_config is 'fp8'.*an object with a quant_method"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8_CONFIG, "scale_fmt": "e4m3"}, "scale_fmt 'e4m3'"),
        ({**FP8_CONFIG, "weight_block_size": [128]}, r"weight_block_size is \[128\].*two positive integers"),
        ({**FP8_CONFIG, "weight_block_size": [128, 0]}, "two positive integers"),
        ({**FP8_CONFIG, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({**compressed("tensor").config, "ignore": ["re:("]}, r"ignore is 're:\('.*valid patterns"),
        (
            {**compressed("tensor").config, "format": "nvfp4-pack-quantized"},
            "the format 'nvfp4-pack-quantized' of group_0",
        ),
        ({**compressed("tensor").config, "config_groups": {}}, "config_groups {}"),
        ({**compressed("tensor").config, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**compressed("tensor").config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (group(num_bits=4), "weights of group_0 with num_bits 4 "),
        (group(type="int"), "weights of group_0 with type 'int'"),
        (group(symmetric=False), "symmetric False"),
        (group(strategy="group", group_size=128), "strategy 'group' of group_0"),
        (group(strategy="block", block_structure=None), "block_structure of group_0 is None"),
        (with_group(targets=["Embedding"]), r"targets \['Embedding'\]"),
        (with_group(weights=None), "config_groups.group_0 without weights"),
        (with_group(format="int-quantized"), "the format 'int-quantized'"),
    ],
)
def test_quantisations_that_are_refused(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quantization(HFConfig({"quantization_config": config}, Path("config.json")))


def test_what_is_listed_as_not_quantised() -> None:
    config = {**compressed("tensor").config, "ignore": ["lm_head", "model.layers.1", r"re:.*mlp\.gate$"]}
    known = read_quantization(HFConfig({"quantization_config": config}, Path("config.json")))
    assert known is not None
    ignored = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.gate.weight"]
    others = ["model.layers.11.mlp.up_proj.weight", "model.layers.2.mlp.gate_proj.weight", "my_lm_head.weight"]
    assert [name for name in (*ignored, *others) if known.ignores(name)] == ignored
