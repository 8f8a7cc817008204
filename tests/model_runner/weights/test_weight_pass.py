"""Weights: one pass over the files, by pinned memory to a device; values, order, bounds, and who waits for what.

Experts in MXFP4, as gpt-oss stores them, are compared with transformers' own dequantisation.
"""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_qwen3_moe_checkpoint, with_config
from fp8_checkpoints import blockwise, one_weight, write_fp8
from model_checks import close, expected_logits, prefill_logits
from safetensors.torch import load_file, save_file
from step_cases import Place, Recorder, StepStreamsFake
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_runner import (
    Checkpoint,
    CheckpointError,
    ExpertParallel,
    ModelRunner,
    TensorMissing,
    WrongShape,
    model_class,
)
from model_runner.drafting.network import load_draft
from model_runner.weights import weight_pass as module
from model_runner.weights.quantization import MXFP4Blocks
from model_runner.weights.weight_pass import PINNED_BYTES, Wanted, WeightPass
from model_runner.weights.weights import Part
from serving.engine.rank.build import WeightsBar

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3_moe_checkpoint(tmp_path_factory.mktemp("sharded"), max_shard_size="60KB", dtype=torch.bfloat16)
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def tell_of_files(monkeypatch: pytest.MonkeyPatch, tell: Callable[[str, Tensor], None]) -> None:
    """Let `tell` know (name of the file, tensor) of all that any checkpoint maps."""
    mapped = Checkpoint._mapped

    def told(checkpoint: Checkpoint, name: str) -> Tensor:
        tensor = mapped(checkpoint, name)
        tell(checkpoint._file_of[name], tensor)
        return tensor

    monkeypatch.setattr(Checkpoint, "_mapped", told)


# ------------------------------------------------------------------------------------------------------ to a device


class Device:
    """A fake device that loads weights: what is mapped is the host's, and buffers are pinned.

    Attributes:
        pinned: bytes of all buffers that were made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = StepStreamsFake()
        self.recorder = Recorder(self.fake, ())
        self.pinned: list[int] = []
        make = WeightPass._pinned

        def pinned(reading: WeightPass, nbytes: int) -> Tensor:
            buffer = make(reading, nbytes)
            self.recorder.memory(buffer).place = Place.PINNED
            self.pinned.append(nbytes)
            return buffer

        recorder = self.recorder

        class Watched(ThreadPoolExecutor):
            def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
                def run() -> Any:
                    with recorder.for_another_thread():
                        return fn(*args, **kwargs)

                return super().submit(run)

        monkeypatch.setattr(WeightPass, "_pinned", pinned)
        monkeypatch.setattr(module, "ThreadPoolExecutor", Watched)
        tell_of_files(monkeypatch, lambda _, tensor: self.is_host(tensor))

    def is_host(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.recorder.memory(tensor).place = Place.HOST

    def check(self, *loaded: Tensor) -> None:
        """All of these came by pinned memory, and nothing was written while it was read."""
        assert self.fake.races == []
        assert self.fake.faults == []
        assert {self.recorder.memory(tensor).place for tensor in loaded} == {Place.DEVICE}


@pytest.mark.long
@pytest.mark.parametrize(("family", "fp8"), [("Qwen3Moe", False), ("DeepseekV3", False), ("Qwen3Moe", True)])
def test_no_copy_to_the_device_is_from_pageable_memory(
    tmp_path: Path, family: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 is dequantised on its way, by the readers: what is mapped never meets the device."""
    path = meant = make_checkpoint(tmp_path / "plain", family, dtype=torch.float32 if fp8 else torch.bfloat16)
    if fp8:
        path, meant = write_fp8(path, tmp_path, blockwise(20, 28))
    with ModelRunner(meant, num_kv_blocks=4, experts_backend="grouped") as runner:
        expected = runner.model.state_dict()
    device = Device(monkeypatch)
    with device.recorder:
        runner = ModelRunner(path, num_kv_blocks=4, experts_backend="grouped", streams=device.fake)
    with runner:
        device.check(*runner.model.parameters())
        found = runner.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum(device.pinned) <= PINNED_BYTES


def test_drafts_travel_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path / "draft", "Llama", num_hidden_layers=1)
    with ModelRunner(make_checkpoint(tmp_path / "target", "Llama", seed=1), num_kv_blocks=4) as runner:
        device = Device(monkeypatch)
        monkeypatch.setattr(module, "make_streams", lambda _: device.fake)
        with device.recorder:
            draft: Any = load_draft("draft_model", path, runner)
        device.check(*draft._model.parameters())


SHAPES = [(3, 5), (700,), (40, 33), (2, 3, 900), (1,), (0, 4), (9, 300), ()]


def test_pieces_fit_a_bound_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, and rows, that are larger than a buffer; conversion; places that are not dense; many rounds."""
    device = Device(monkeypatch)
    sources = [torch.randn(shape).to(torch.bfloat16) for shape in SHAPES * 3]
    wide = torch.zeros(11, 64, dtype=torch.bfloat16)
    outs = [torch.zeros(source.shape) for source in sources]
    told: list[tuple[int, int]] = []
    with device.recorder:
        device.is_host(*sources, part := torch.randn(11, 20))
        reading = WeightPass(CPU, device.fake, pinned_bytes=8 * 1024)
        for number, (source, out) in enumerate(zip(sources, outs, strict=True)):
            reading.want(Wanted(f"file {number % 2}", source, out))
        reading.want(Wanted("file 3", part.t()[4:9].t(), wide[:, 3:8]))
        reading.run(lambda done, total: told.append((done, total)))
    device.check(*(out for out in outs if out.numel()), wide)
    assert sum(device.pinned) == 8 * 1024
    assert all(torch.equal(out, source.float()) for out, source in zip(outs, sources, strict=True))
    assert torch.equal(wide[:, 3:8], part[:, 4:9].bfloat16())
    assert not wide[:, 8:].any()
    total = sum(out.nbytes for out in outs) + 11 * 5 * 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {all_of_it for _, all_of_it in told} == {total}
    assert told[-1] == (total, total)


def test_a_buffer_is_written_again_only_when_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device finds it, if nobody waits."""
    device = Device(monkeypatch)
    monkeypatch.setattr(device.fake, "new_event", lambda: SimpleNamespace(record=id, synchronize=lambda: None))
    with device.recorder:
        device.is_host(source := torch.randn(100, 200))
        reading = WeightPass(CPU, device.fake, pinned_bytes=8 * 1024)
        reading.want(Wanted("file", source, torch.zeros(100, 200)))
        reading.run()
    assert any("the host writes" in race for race in device.fake.races)


def test_a_reader_that_fails_fails_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(module, "_fill", broken)
    reading = WeightPass(CPU, StepStreamsFake())
    reading.want(Wanted("file", torch.ones(4), torch.zeros(4)))
    with pytest.raises(OSError, match="planted"):
        reading.run()


@pytest.mark.gpu
def test_weights_on_a_gpu(sharded: Path) -> None:
    with ModelRunner(sharded, num_kv_blocks=4, experts_backend="grouped", dtype=torch.bfloat16) as runner:
        expected = runner.model.state_dict()
    with ModelRunner(sharded, num_kv_blocks=4, experts_backend="grouped", dtype=torch.bfloat16, device="cuda") as there:
        found = there.model.state_dict()
        assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


# --------------------------------------------------------------------------------------------------------- in order


class Reads(TorchDispatchMode):
    """Notes where in which file every copy reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.files: dict[int, tuple[str, Tensor]] = {}
        self.found: list[tuple[str, int, int]] = []
        tell_of_files(monkeypatch, self._know)

    def _know(self, file: str, tensor: Tensor) -> None:
        self.files[tensor.untyped_storage().data_ptr()] = file, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            source = args[1]
            known = self.files.get(source.untyped_storage().data_ptr())
            if known is not None:
                start = source.data_ptr()
                self.found.append((known[0], start, start + source.numel() * source.itemsize))
        return func(*args, **(kwargs or {}))


def test_the_files_are_read_once_from_front_to_back(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    with Reads(monkeypatch) as reads:
        ModelRunner(sharded, num_kv_blocks=4, experts_backend="grouped").close()
    assert len(reads.found) == len(index["weight_map"]), "every tensor is read once"
    assert reads.found == sorted(reads.found)
    ends = zip(reads.found, reads.found[1:], strict=False)
    assert all(end <= start for (file, _, end), (next_file, start, _) in ends if file == next_file), "and no byte twice"
    assert {file for file, _, _ in reads.found} == set(index["weight_map"].values())


def test_a_rank_reads_its_own_experts_only(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    checkpoint = Checkpoint(sharded, progress=lambda done, total: told.append((done, total)))
    kind = model_class(checkpoint.architecture)
    config = kind.read_config(checkpoint.config, checkpoint.generation_config())
    transport: Any = SimpleNamespace(experts=range(6, 8), num_experts=8, group=None, traits=None)
    monkeypatch.setattr("model_runner.decoder.sparse_mlp.FusedMoEModularKernel", lambda *_, **__: torch.nn.Identity())
    with Reads(monkeypatch) as reads:
        kind.load(config, checkpoint, ExpertParallel(transport))
    experts = [name for name in checkpoint.names if ".experts." in name]
    assert len(reads.found) == len(checkpoint.names) - len(experts) * 6 // 8
    numbers = sum(end - start for _, start, end in reads.found) // 2
    assert told[-1] == (4 * numbers, 4 * numbers), "float32 in place"


# ------------------------------------------------------------------------------------------------- who looks at what


@contextmanager
def opened(path: Path) -> Iterator[tuple[Checkpoint, Tensor]]:
    """A checkpoint, and what is in its last norm."""
    checkpoint = Checkpoint(path)
    yield checkpoint, Checkpoint(path).load("model.norm.weight", 48)
    checkpoint.close()


def test_what_is_asked_for_in_a_pass_is_there_at_its_end(sharded: Path) -> None:
    with opened(sharded) as (checkpoint, norm):
        with checkpoint.one_pass():
            out = checkpoint.load("model.norm.weight", 48).zero_()
            with checkpoint.one_pass():
                pass
            assert not out.any(), "a block inside another one is part of it"
        assert torch.equal(out, norm)
        assert torch.equal(checkpoint.load("model.norm.weight", 48), norm), "and outside of a pass at once"


def test_who_looks_at_tensors_is_called_when_they_are_there(sharded: Path) -> None:
    seen: list[Any] = []
    with opened(sharded) as (checkpoint, norm):
        first = torch.zeros(48)
        for whole in (checkpoint.one_pass, nullcontext):
            seen.clear()
            first.zero_()
            with whole(), checkpoint.once_read(lambda: seen.append("all")):
                with checkpoint.once_read(lambda: seen.append(torch.equal(first, norm))):
                    checkpoint.load_into("model.norm.weight", first)
                with checkpoint.once_read(lambda: seen.append("nothing")):
                    pass
                checkpoint.load("model.layers.0.input_layernorm.weight", 48)
            assert sorted(map(str, seen)) == ["True", "all", "nothing"]
            assert seen[-1] == "all", "whatever lies first in the file"


def test_a_tensor_that_is_missing_is_told_when_it_is_asked_for(sharded: Path) -> None:
    called: list[int] = []
    with (
        opened(sharded) as (checkpoint, _),
        pytest.raises(TensorMissing, match=r"no tensor 'model\.norm\.wait'"),
        checkpoint.one_pass(),
        checkpoint.once_read(lambda: called.append(1)),
    ):
        checkpoint.load("model.norm.wait", 48)
    assert not called


def test_loading_shows_a_bar_and_logs_a_line(
    sharded: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="serving"):
        ModelRunner(sharded, num_kv_blocks=4, on_weights=WeightsBar(show=False)).close()
        assert "weights" not in capsys.readouterr().err
        WeightsBar()(3 << 20, 4 << 20)
    (record,) = caplog.records
    assert record.getMessage().startswith('weights loaded memory="0.')


CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def stored(experts: int = 3, rows: int = 10, groups: int = 5) -> dict[str, Tensor]:
    blocks = torch.randint(256, (experts, rows, groups, 16), dtype=torch.uint8)
    return {"w_blocks": blocks, "w_scales": torch.randint(0, 240, (experts, rows, groups), dtype=torch.uint8)}


def folder(path: Path, tensors: dict[str, Tensor], architecture: str = "GptOssForCausalLM") -> Path:
    return one_weight(path, tensors, CONFIG, architectures=[architecture])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_and_in_parts(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = stored()
    tensors["w_bias"] = torch.randn(3, 10)
    expected = convert_moe_packed_tensors(tensors["w_blocks"], tensors["w_scales"], dtype=dtype)
    checkpoint = Checkpoint(folder(tmp_path, tensors), dtype=dtype)
    assert torch.equal(checkpoint.load("w", 3, 160, 10), expected)
    monkeypatch.setattr("model_runner.weights.quantization._ROOM", 500)  # some rows at a time
    assert torch.equal(checkpoint.load("w", 3, 160, 10), expected)
    for experts, columns, rows in [((1, 2), (40, 80), (0, 10)), ((2, 1), (31, 2), (3, 7)), ((0, 3), (159, 1), (9, 1))]:
        parts = [Part(*part, total) for part, total in ((experts, 3), (columns, 160), (rows, 10))]
        assert torch.equal(checkpoint.load("w", *parts), expected[tuple(part.slice for part in parts)])
    part = MXFP4Blocks.whole(tensors["w_blocks"], tensors["w_scales"])[1:3, 5:150][1, 40:47]
    part.read(out := torch.empty(7, 10, dtype=dtype))
    assert torch.equal(out, expected[2, 45:52]), "a part of a part, with a number for a dimension, as a pass cuts them"
    assert torch.equal(checkpoint.load("w_bias", 3, 10), tensors["w_bias"].to(dtype))
    assert checkpoint.stored_dtypes() == ("float32",)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "GptOss", hidden_size=64, intermediate_size=96)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    packed = {name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")}
    halves = [name for name in weights if name.endswith(("_blocks", "_scales"))]
    save_file({name: w for name, w in weights.items() if name not in halves}, path / "model.safetensors")
    expected = expected_logits(path)
    save_file({name: w for name, w in weights.items() if name not in packed}, path / "model.safetensors")
    with_config(path, quantization_config=CONFIG)
    close(prefill_logits(path), expected)


def test_what_does_not_fit(tmp_path: Path) -> None:
    tensors = stored()
    with pytest.raises(CheckpointError, match=r"'mxfp4' .MXFP4, which only gpt-oss may have"):
        Checkpoint(folder(tmp_path, tensors, "Qwen3ForCausalLM")).load("w", 3, 160, 10)
    with pytest.raises(WrongShape, match=r"'w' has shape \[3, 160, 10\].* asks for \[3, 10, 160\]"):
        Checkpoint(folder(tmp_path, tensors)).load("w", 3, 10, 160)
    with pytest.raises(WrongShape, match=r"'w_scales' has shape \[3, 10, 4\].* asks for \[3, 10, 5\]"):
        Checkpoint(folder(tmp_path, {**tensors, "w_scales": stored(groups=4)["w_scales"]})).load("w", 3, 160, 10)
    with pytest.raises(CheckpointError, match=r"'w_blocks' is torch.float32 .*MXFP4 is \[experts, rows, groups, 16\]"):
        Checkpoint(folder(tmp_path, {**tensors, "w_blocks": tensors["w_blocks"].float()})).load("w", 3, 160, 10)
