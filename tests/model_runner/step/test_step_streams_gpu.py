"""The overlapped loop on a device that runs by itself: the same tokens as the plain loop, and nobody waits in vain.

Where it matters the device is kept busy by a kernel that sleeps; what must not wait for it is then done meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_checkpoint import make_small
from host_waits import no_host_waits
from request_steps import Ahead

from model_runner import ModelRunner, SamplingParams, generate
from ubatch import UBatchConfig
from ubatch.streams.small_copies import to_device

pytestmark = pytest.mark.long

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
NEW = 24
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7]
MIXED = [
    SamplingParams(max_tokens=NEW, ignore_eos=True),
    SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.4, seed=4, top_k=60, top_p=0.9),
    SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2, allowed_token_ids=tuple(range(0, 60, 2))),
    SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.9, seed=5, min_p=0.01),
]
CONSTRAINED = [
    SamplingParams(max_tokens=NEW, ignore_eos=True, frequency_penalty=1.5, presence_penalty=1.0),
    SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.1, seed=6, repetition_penalty=1.5),
    SamplingParams(max_tokens=NEW, ignore_eos=True, min_tokens=4, stop_token_ids=(9,), bad_token_sequences=((58, 58),)),
    SamplingParams(max_tokens=NEW, ignore_eos=True),
]
SLEEP_CYCLES = 2_000_000_000
"""About a second."""


@pytest.fixture(scope="module", params=["dense", "moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small(tmp_path_factory.mktemp("small"), dense=request.param == "dense")


def make_runner(checkpoint: Path, device: str, *, lanes: bool = False) -> ModelRunner:
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    return ModelRunner(checkpoint, device=device, num_kv_blocks=100, block_size=16, max_num_seqs=6, dbo=dbo)


# -- who waits for whom -------------------------------------------------------------------------------------------


def warmed_up(runner: ModelRunner, params: Sequence[SamplingParams]) -> Ahead:
    """Requests that decode: what steps need is compiled, and the pools are filled."""
    ahead = Ahead.admit(runner, PROMPTS, params)
    for _ in range(3):
        ahead.read(ahead.launch())
    return ahead


@pytest.fixture
def ahead(checkpoint: Path) -> Iterator[Ahead]:
    with make_runner(checkpoint, "cuda") as runner:
        ahead = warmed_up(runner, MIXED)
        yield ahead
        for request in ahead.requests:
            runner.release(request)


@pytest.mark.sample(3)
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_steps_that_are_launched_ahead_give_the_same_tokens(checkpoint: Path, device: str, lanes: bool) -> None:
    with make_runner(checkpoint, device, lanes=lanes) as runner:
        one_by_one = [list(output.token_ids) for output in generate(runner, PROMPTS, MIXED)]
        assert Ahead.admit(runner, PROMPTS, MIXED).run(NEW) == one_by_one


@contextmanager
def device_asleep(runner: ModelRunner) -> Iterator[torch.cuda.Event]:
    """The forward stream sleeps for a second from here on; an event that says when it has woken up."""
    awake = torch.cuda.Event()
    with runner.streams.forward():
        torch.cuda._sleep(SLEEP_CYCLES)
        awake.record()
    yield awake
    torch.cuda.synchronize()
    assert awake.query()


@pytest.mark.gpu
def test_a_launch_returns_before_the_forward_has_begun(ahead: Ahead) -> None:
    with device_asleep(ahead.runner) as awake:
        step = ahead.launch()
        assert not awake.query()
    ahead.read(step)


@pytest.mark.gpu
def test_a_step_is_read_while_the_next_one_runs(ahead: Ahead) -> None:
    before = ahead.launch()
    with device_asleep(ahead.runner) as awake:
        step = ahead.launch()
        ahead.read(before)
        assert not awake.query()
    ahead.read(step)


@pytest.mark.gpu
def test_inputs_arrive_while_a_step_runs_and_the_caller_waits_for_nobody(ahead: Ahead) -> None:
    streams, sent = ahead.runner.streams, [torch.arange(1000), torch.empty(0), torch.rand(2, 3, dtype=torch.float64)]
    with device_asleep(ahead.runner) as awake:
        with streams.forward():
            arrived = to_device(sent, ahead.runner.device)
        streams._upload.synchronize()
        assert not awake.query()
        step = ahead.launch()
        torch.cuda.current_stream().synchronize()
        assert not awake.query()
    for here, there in zip(sent, arrived, strict=True):
        assert torch.equal(there.cpu(), here)
    ahead.read(step)


@pytest.mark.gpu
@pytest.mark.parametrize("params", [MIXED, CONSTRAINED])
def test_nothing_in_a_step_waits_for_the_device(checkpoint: Path, params: list[SamplingParams]) -> None:
    with make_runner(checkpoint, "cuda") as runner:
        ahead = warmed_up(runner, params)
        for _ in range(3):
            with no_host_waits():
                step = ahead.launch()
            ahead.read(step)


@pytest.mark.gpu
def test_constrained_sampling_waits_for_tokens_but_its_forward_does_not(checkpoint: Path) -> None:
    with make_runner(checkpoint, "cuda") as runner:
        ahead = warmed_up(runner, CONSTRAINED)
        before, ahead.late = ahead.launch(), True
        with device_asleep(runner) as awake:
            step = ahead.launch()
            ahead.read(before)
            step.sample()
            assert not awake.query()
        ahead.read(step)


@pytest.mark.gpu
def test_steps_take_no_more_memory_as_they_go_on(checkpoint: Path) -> None:
    with make_runner(checkpoint, "cuda") as runner:
        taken = []
        for _ in range(20):
            Ahead.admit(runner, PROMPTS, [replace(each, max_tokens=50) for each in MIXED]).run(50)
            torch.cuda.synchronize()
            pinned = runner.streams._pinned
            buffers = [*pinned._free, *(buffer for _, buffer, _ in pinned._lent)]
            taken.append((torch.cuda.memory_allocated(), sum(buffer.nbytes for buffer in buffers)))
    device, host = zip(*taken, strict=True)
    assert max(device[5:]) <= max(device[:5])
    assert max(host[5:]) <= 2 * max(host[:5])  # a slow host or device may find one more of them lent


@pytest.mark.gpu
def test_closing_waits_for_what_is_queued(checkpoint: Path) -> None:
    with make_runner(checkpoint, "cuda") as runner:
        warmed_up(runner, MIXED)
        done = torch.cuda.Event()
        with runner.streams.forward():
            torch.cuda._sleep(SLEEP_CYCLES // 4)
            done.record()
        assert not done.query()
    assert done.query()
