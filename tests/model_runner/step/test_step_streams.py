"""The streams of steps, checked on a CPU: real steps of a small model, every operation of them on fake streams.

Nothing may touch what an operation on another stream may still be working on, and nobody may wait for what he does not
need. That the checks would see it is checked, too: each wait and each hold is left out once.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from dense_checkpoint import make_small
from fake_device import run
from fake_streams import FakeEvent, FakeStream
from request_steps import Ahead, admitted, step
from step_cases import StepStreamsFake, recording
from step_host import Place

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, build_input_batch, generate
from serving.engine import EngineCore
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import UBatchConfig
from ubatch.kernels import sums
from ubatch.lanes.workers import LanePool

pytestmark = pytest.mark.long

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 5]
NEW = 5
DRAWN = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, temperature=1.4, seed=4, top_k=60),
    SamplingParams(max_tokens=NEW, logprobs=2, logit_bias=((7, 3.0),), allowed_token_ids=tuple(range(0, 60, 2))),
    SamplingParams(max_tokens=NEW, temperature=0.9, seed=5, min_p=0.01),
]
CONSTRAINED = [
    SamplingParams(max_tokens=NEW, frequency_penalty=1.5, presence_penalty=1.0, logprobs=1),
    SamplingParams(max_tokens=NEW, temperature=1.1, seed=6, repetition_penalty=1.5),
    SamplingParams(max_tokens=NEW, min_tokens=4, stop_token_ids=(9,), ignore_eos=True),
    SamplingParams(max_tokens=NEW, bad_token_sequences=((62,), (64, 64), (33, 33))),
]


checkpoint = checkpoint_fixture(make_small, dense=True, layers=1)


@pytest.fixture(autouse=True, scope="module")
def _no_kernels_in_c() -> Iterator[None]:
    """The fake sees torch's operators only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "why_not_c", lambda: "the fake would not see them")
        yield


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[ModelRunner]:
    with make_runner(checkpoint) as runner:
        yield runner


def make_runner(checkpoint: Path, fake: StepStreamsFake | None = None, *, lanes: bool = False) -> ModelRunner:
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    options: dict[str, Any] = {"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 6, "dbo": dbo, "streams": fake}
    return ModelRunner(checkpoint, experts_backend="grouped", attention_backend="torch", **options)


def expected(runner: ModelRunner, params: list[SamplingParams]) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(runner, PROMPTS, params)]


class Steps:
    """Steps of a runner on fake streams, recorded."""

    def __init__(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, lanes: bool = False) -> None:
        self.fake = StepStreamsFake()
        self.runner = make_runner(checkpoint, self.fake, lanes=lanes)
        self.monkeypatch = monkeypatch

    def run(self, params: list[SamplingParams], *, late: bool = False) -> list[list[int]]:
        """The tokens; with `late` a step is sampled once the one before is read."""
        with recording(self.runner, self.fake, self.monkeypatch):
            return Ahead.admit(self.runner, PROMPTS, params, late=late, fake=self.fake).run(NEW)

    @property
    def faults(self) -> list[str]:
        """All that was found."""
        return self.fake.races + self.fake.faults


@pytest.fixture
def steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps(checkpoint, monkeypatch)
    yield steps
    steps.runner.close()


# -- steps of a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("params", "late"), [(DRAWN, False), (DRAWN, True), (CONSTRAINED, True)])
def test_every_order_that_is_needed_is_there(
    steps: Steps, plain: ModelRunner, params: list[SamplingParams], late: bool
) -> None:
    assert steps.run(params, late=late) == expected(plain, params)
    assert steps.faults == []
    for stream in ("forward", "upload", "download"):
        assert len(steps.fake.tagged("", stream)) >= NEW, stream


@pytest.mark.parametrize(("params", "late"), [(DRAWN, False), (CONSTRAINED, True)])
def test_and_none_that_costs_overlap(steps: Steps, params: list[SamplingParams], late: bool) -> None:
    steps.run(params, late=late)
    fake = steps.fake
    assert "wait caller" not in fake.log, "the scheduling thread's stream waits for nobody"
    for number in range(1, NEW):
        launched = [*fake.tagged(f"launch {number} "), *([] if late else fake.tagged(f"sample {number} "))]
        uploads = [each for each in launched if each.stream.name == "upload"]
        assert uploads
        logits = fake.tagged(f"launch {number - 1} ", "forward")[-1]
        running = {logits, *fake.tagged(f"sample {number - 1} ", "forward")}
        assert not any(running & each.waits for each in uploads), "the next inputs arrive while a step runs"
        arriving = set(fake.tagged(f"sample {number - 1} ", "download"))
        assert arriving
        ahead = [each for each in launched if each.stream.name != "download"]
        assert not any(arriving & each.waits for each in ahead), "a step is launched before the last one is read"
        later = set(fake.tagged(f"launch {number} "))
        assert not any(later & each.waits for each in arriving), "and what is read does not wait for the next step"


def test_sampling_that_waits_for_tokens_does_not_hold_up_the_forward(steps: Steps) -> None:
    """The forward of a constrained step is queued before the step before it is read; only its sampling comes after."""
    steps.run(CONSTRAINED, late=True)
    fake = steps.fake
    read = set(fake.tagged("sample 1 ", "download"))
    assert not any(read & each.waits for each in fake.tagged("launch 2 "))
    assert all(read <= each.waits for each in fake.tagged("sample 2 "))


def test_steps_that_nobody_reads(steps: Steps) -> None:
    """They are dropped while they run, as when a rank fails: what they use stays until they are done."""
    with recording(steps.runner, steps.fake, steps.monkeypatch):
        requests = [Request("sampled", PROMPTS[0], DRAWN[1]), Request("launched", PROMPTS[3], DRAWN[0])]
        for request in requests:
            steps.runner.admit(request, 30)
            step = steps.runner.launch([ScheduledRequest(request, request.num_tokens)])
            if request.request_id == "sampled":
                steps.fake.host |= steps.fake.streams["forward"].done  # the launched part has run
                step.sample()
            del step
        assert steps.faults == []
        steps.runner.close()
        assert steps.runner.streams._blocks == steps.runner.streams._downloads == deque()
    assert steps.faults == []


def test_verify_steps_and_prompt_logprobs(steps: Steps, plain: ModelRunner) -> None:
    def run(runner: ModelRunner) -> list[Any]:
        (request,) = admitted(runner, PROMPTS[3:], 40, prompt_logprobs=2)
        shares = ScheduledRequest(request, 9), ScheduledRequest(request, 6), ScheduledRequest(request, 1, (5, 6, 7))
        outputs = [step(runner, [share]) for share in shares]
        runner.release(request)
        return [(output.tokens, output.prompt_logprobs) for output in outputs]

    with recording(steps.runner, steps.fake, steps.monkeypatch):
        found = run(steps.runner)
    assert found == run(plain)
    assert steps.faults == []


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("params", [DRAWN, CONSTRAINED])
def test_the_overlapped_loop_of_an_engine(steps: Steps, plain: ModelRunner, params: list[SamplingParams]) -> None:
    """Chunks of prompts, requests that end while they run once more, blocks that change hands, delayed sampling."""
    params = [replace(each, max_tokens=3 + number) for number, each in enumerate(params)]
    expected = serve(plain, params, overlap=False)
    with recording(steps.runner, steps.fake, steps.monkeypatch):
        assert serve(steps.runner, params, overlap=True) == expected
    assert steps.faults == []
    assert "wait caller" not in steps.fake.log


def serve(runner: ModelRunner, params: list[SamplingParams], *, overlap: bool) -> dict[str, list[int]]:
    """The tokens of all requests; two run at once."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, enable_prefix_caching=False)
    scheduler = Scheduler(config, runner.allocator, runner.request_table, eos_token_ids=(), vocab_size=384)
    requests = [RequestInput(str(n), prompt, params[n]) for n, prompt in enumerate(PROMPTS)]
    return run(EngineCore(runner, scheduler, overlap_schedule=overlap), requests)


def test_in_lanes(checkpoint: Path, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes' compute stream is the forward stream, whoever launched."""
    steps = Steps(checkpoint, monkeypatch, lanes=True)
    with steps.runner:
        cpu = torch.device("cpu")
        steps.runner.wrapper._ubatch_wrapped.execution.pools[2, cpu] = LanePool(2, cpu, 20.0, steps.fake)
        assert steps.run(DRAWN) == expected(plain, DRAWN)
        assert steps.runner.statistics().engaged == NEW
    assert steps.faults == []
    in_lanes = [each for each in steps.fake.operations if each.lane is not None]
    assert {each.lane for each in in_lanes} == {0, 1}
    assert {each.stream.name for each in in_lanes} == {"forward"}


def test_logits_for_the_caller(steps: Steps) -> None:
    runner = steps.runner
    with recording(runner, steps.fake, steps.monkeypatch) as recorder:
        (request,) = admitted(runner, PROMPTS[:1])
        shares = [ScheduledRequest(request, request.num_tokens)]
        with runner.streams.forward():
            batch = build_input_batch(shares, runner.request_table, runner.kv_cache.spec, runner.device)
        logits = runner.forward(runner.agree(batch))
        assert recorder.memory(logits).place is Place.DEVICE
        logits.argmax()
        runner.release(request)
    assert steps.fake.operations[-1].stream is steps.fake.compute
    assert steps.faults == []


# -- planted errors -----------------------------------------------------------------------------------------------


def never_wait_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that stream `name` waits for are not waited for."""
    wait = FakeEvent.wait

    def waits(self: FakeEvent, stream: FakeStream) -> None:
        if stream.name != name:
            wait(self, stream)

    monkeypatch.setattr(FakeEvent, "wait", waits)


def read_at_once(steps: Steps) -> None:
    steps.monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)


def use_buffers_at_once(steps: Steps) -> None:
    """The host writes into pinned memory that a copy may still read."""
    steps.monkeypatch.setattr(FakeEvent, "query", lambda self: True)


def keep_nothing(steps: Steps) -> None:
    steps.runner.streams._blocks = deque(maxlen=0)


def write_weights_first(steps: Steps) -> None:
    """Something for the forward to wait for: the caller's stream still works on the weights."""
    launch = steps.runner.launch

    def launched(*args: Any) -> Any:
        if not steps.fake.operations:
            with torch.no_grad():
                steps.runner.model.norm.mul_(1)  # type: ignore[operator, union-attr]
        return launch(*args)

    steps.monkeypatch.setattr(steps.runner, "launch", launched)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda steps: never_wait_on("forward", steps.monkeypatch), "which nothing orders after launch 0 copy_"),
        (lambda steps: never_wait_on("forward", steps.monkeypatch), "which nothing orders after launch 0 mul_"),
        (lambda steps: never_wait_on("download", steps.monkeypatch), "which nothing orders after sample 0 cat"),
        (read_at_once, "the host reads memory"),
        (use_buffers_at_once, "the host writes memory"),
        (keep_nothing, "of upload is freed while sample 0"),
    ],
)
def test_an_order_that_is_missing_is_found(steps: Steps, plant: Callable[[Steps], None], found: str) -> None:
    write_weights_first(steps)
    plant(steps)
    steps.run(DRAWN)
    assert any(found in fault for fault in steps.faults), steps.faults[:5]


def test_a_copy_that_is_dropped_needs_what_it_copies(steps: Steps) -> None:
    steps.runner.streams._downloads = deque(maxlen=0)
    with recording(steps.runner, steps.fake, steps.monkeypatch):
        (request,) = admitted(steps.runner, PROMPTS[:1])
        steps.runner.launch([ScheduledRequest(request, 8)]).sample()
    assert any("of forward is freed while copy_ on download" in fault for fault in steps.faults), steps.faults


@pytest.mark.wide
def test_an_upload_past_the_pinned_buffers_is_found(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_runner.sampling.sampler.to_device", lambda tensors, device: list(tensors))
    steps.run(DRAWN)
    assert any("takes tensors of the host and of the device" in fault for fault in steps.faults)
