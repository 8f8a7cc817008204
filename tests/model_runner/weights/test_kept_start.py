"""What a rank's process leaves in memory, and what its next one takes of it: the model, and what was measured."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from model_checks import prompt_logits
from repository import MODELS, TINY_MOE
from torch import Tensor, nn

from model_runner import ModelRunner
from model_runner import runner as runner_module
from model_runner.settings import DraftSetting, DraftShape
from model_runner.weights import KeptStart, describe_files, kept
from ubatch.kernels import choice, remember_choices


@pytest.fixture
def memory() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def start(memory: int, path: Path = TINY_MOE, **settings: Any) -> ModelRunner:
    """A runner of a rank's next process."""
    return ModelRunner(path, num_kv_blocks=64, kept=KeptStart(memory, describe_files(path)), **settings)


def attached(runner: ModelRunner) -> bool:
    assert runner.settings.kept is not None
    return runner.settings.kept.attached


def logits(path: Path = TINY_MOE, **settings: Any) -> Tensor:
    with ModelRunner(path, num_kv_blocks=64, **settings) as runner:
        return prompt_logits(runner)


@pytest.mark.long
@pytest.mark.wide_sample(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_process_attaches_every_family(
    family: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, family)
    own = logits(path)
    with start(memory, path) as first:
        assert not attached(first)
        assert torch.equal(prompt_logits(first), own)
    monkeypatch.setattr(runner_module, "read_model", _without_loading(runner_module.read_model))
    with start(memory, path) as second:
        assert attached(second)
        assert torch.equal(prompt_logits(second), own)


def _without_loading(read_model: Callable[..., Any]) -> Callable[..., Any]:
    return lambda checkpoint: (SimpleNamespace(load=None), read_model(checkpoint)[1])


def test_both_processes_use_the_same_bytes_once(memory: int) -> None:
    with start(memory, experts_backend="grouped") as first, start(memory, experts_backend="grouped") as second:
        model: Any = second.model
        assert model.lm_head is model.embed_tokens
        weights = list(second.model.parameters())
        assert os.fstat(memory).st_size < sum(w.nbytes for w in weights) + (1 << 18)
        assert second.split_cost == first.split_cost


def test_what_a_process_writes_to_its_weights_stays_its_own(memory: int) -> None:
    own = logits(experts_backend="grouped")
    with start(memory, experts_backend="grouped") as first:
        for weight in first.model.parameters():
            weight.data.fill_(float("nan"))
    with start(memory, experts_backend="grouped") as second:
        assert attached(second)
        assert torch.equal(prompt_logits(second), own)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = kept._write

    def killed(descriptor: int, storage: torch.UntypedStorage, begin: int) -> None:
        written.append(begin)
        if len(written) == 5:
            raise KeyboardInterrupt
        write(descriptor, storage, begin)

    with start(memory):
        pass
    os.ftruncate(memory, os.fstat(memory).st_size - 1)  # the checksum is wrong
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            start(memory)
    assert len(written) == 5
    own = logits()
    for again in (False, True):
        with start(memory) as runner:
            assert attached(runner) is again
            assert torch.equal(prompt_logits(runner), own)


@pytest.mark.parametrize("other", ["time", "size", "settings"])
def test_what_was_made_for_anything_else_is_dropped(other: str, memory: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen3Moe")
    made_for = f"one {describe_files(path)}"
    assert not KeptStart(memory, made_for).measured
    KeptStart(memory, made_for).measured["native"] = True
    assert KeptStart(memory, f"one {describe_files(path)}").measured == {"native": True}
    file = path / "model.safetensors"
    if other == "time":
        os.utime(file, ns=(0, 0))
    elif other == "size":
        with file.open("ab") as out:
            out.write(b" ")
    begun = KeptStart(memory, f"{'another' if other == 'settings' else 'one'} {describe_files(path)}")
    assert not begun.measured
    assert begun.attach({}) is None


@pytest.mark.long
def test_packed_layouts_of_onednn_are_not_kept(memory: int, caplog: pytest.LogCaptureFixture) -> None:
    own = logits(experts_backend="packed")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with start(memory, experts_backend="packed") as runner:
                assert not attached(runner)
                assert torch.equal(prompt_logits(runner), own)
    assert "will load the model again" in caplog.text


@pytest.mark.parametrize(("algorithm", "path"), [("eagle", MODELS / "tiny-moe-eagle"), ("draft_model", TINY_MOE)])
def test_a_draft_network_is_kept_with_the_model_that_it_shares(algorithm: str, path: Path, memory: int) -> None:
    draft = DraftSetting(algorithm, path, DraftShape(2, 1, 2, sampled=False))
    for again in (False, True):
        with start(memory, draft=draft, num_speculative_tokens=2) as runner:
            assert attached(runner) is again
            assert runner.draft is not None
            if algorithm == "eagle":
                network: Any = runner.draft
                model: Any = runner.model
                assert any(each is model.embed_tokens for each in vars(network)["_modules"].values()) or (
                    network.compute_logits.__self__ is model
                )


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.arange(12.0).view(3, 4)[:, 1:3]
        self.nothing = torch.empty(0, 3)
        self.given = given


given = object()


def test_views_and_empty_tensors_are_themselves_again(memory: int) -> None:
    odd = Odd()
    expected, strides = odd.part.clone(), odd.part.stride()
    found = [KeptStart(memory, "").keep(odd, {"given": given}), KeptStart(memory, "").attach({"given": given})]
    for each in found:
        assert torch.equal(each.part, expected)
        assert each.part.stride() == strides
        assert each.nothing.shape == (0, 3)
        assert each.given is given
    assert not odd.part.untyped_storage().nbytes(), "the loaded one's memory is free"


def test_what_was_measured_is_taken_over(memory: int) -> None:
    asked: list[str] = []

    def measure(answer: bool) -> bool:
        asked.append("measured")
        return answer

    try:
        for _ in range(2):
            remember_choices(KeptStart(memory, "").measured)
            assert choice("native", lambda: measure(True)) is True
            assert choice("packed", lambda: measure(False)) is False
        assert asked == ["measured", "measured"]
    finally:
        remember_choices(None)
    assert choice("native", lambda: measure(False)) is False


def test_an_entry_that_was_being_written_is_not_read(memory: int) -> None:
    first = KeptStart(memory, "")
    first.measured["one"] = 1
    first.measured["two"] = 2
    end = os.pread(memory, 1 << 16, 0).rstrip(b"\0")
    os.pwrite(memory, b"?", len(end) - 2)
    again = KeptStart(memory, "")
    assert again.measured == {"one": 1}
    again.measured["two"] = 3
    assert KeptStart(memory, "").measured == {"one": 1, "two": 3}


def test_the_kv_blocks_are_measured_once(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def measure(runner: ModelRunner, spec: Any, share: float, *_: Any) -> int:
        measured.append(share)
        return 40 + len(measured)

    monkeypatch.setattr(runner_module, "measured_blocks", measure)
    for _ in range(2):
        start = KeptStart(memory, describe_files(TINY_MOE))
        held: Any = object()
        with ModelRunner(TINY_MOE, gpu_memory_utilization=0.5, memory=held, kept=start) as runner:
            assert runner.allocator.num_blocks == 41
    assert measured == [0.5]
