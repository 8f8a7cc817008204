"""`--enable-dbo` as the runner asks it: what is timed and told in the votes, alone and on two ranks.

And a step's stages over all ranks, from the times of its transfers; what the simulator expects of them; and what a step
costs, counted by hand for a small model.
"""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from checkpoints import make_checkpoint, make_qwen3_moe_checkpoint
from request_steps import admitted, step

import model_runner
from model_runner import ModelRunner, ScheduledRequest
from model_runner.auto import step_settings
from model_runner.auto.dbo_policy import Policy, Seen
from model_runner.auto.step_settings import Proposal, StepSettings
from model_runner.auto.step_stages import Stages, expected_log_ratio, row
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.rank.build import make_core, make_runner
from serving.options import read_serve_command
from serving.scheduler import SchedulerConfig
from tests.support.shaped_steps import shaped_step
from ubatch import SCHEDULES, CommGroup, Decision, DeclineReason, ForwardMode, ModeSettings, UBatchConfig, fingerprint
from ubatch.ranks.waits import Arrival
from ubatch.schedules.vote import TOLD_WIDTH

DECODES, PREFILL = shaped_step([1] * 64, ForwardMode.DECODE), shaped_step([128], ForwardMode.PREFILL)


def decided(*rows: int, told: tuple[int, ...] = ()) -> Decision:
    """What ranks with so many decodes agreed on, and what each of them told."""
    modes = (fingerprint(ForwardMode.DECODE),) * len(rows)
    return Decision(False, None, None, tuple((tokens,) for tokens in rows), modes=modes, told=(told,) * len(rows))


def test_on_a_gpu_the_time_is_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for them until they are old."""
    log: list[str] = []

    record, synchronize = partial(log.append, "record"), partial(log.append, "wait")
    event = SimpleNamespace(record=record, synchronize=synchronize, elapsed_time=lambda end: 3.0)
    made = Mock(return_value=event)
    monkeypatch.setattr(torch.cuda, "Event", made)
    auto = StepSettings(UBatchConfig(), None, torch.device("cuda"))
    for _ in range(40):
        told = auto.settings(DECODES).told
        with auto.timed(decided(64, told=told)):
            log.append("forward")
    waits = 0
    for place, what in enumerate(log):
        waits += what == "wait"
        assert log[:place].count("forward") >= waits + 4 or what != "wait"  # the last four may still run
    assert all(each.kwargs == {"enable_timing": True} for each in made.call_args_list)
    found = auto.policy
    assert 5 <= found.timed == waits <= 36
    assert found.kinds["decode"].sizes[64].seconds.value == pytest.approx(math.log(0.003))


@pytest.mark.parametrize(
    "config",
    [
        UBatchConfig(enable_dbo=False),
        UBatchConfig(require_overlap=True),
        UBatchConfig(schedule="serial"),
        UBatchConfig(modes=dict.fromkeys(("decode", "prefill", "verify"), ModeSettings(token_threshold=64))),
    ],
)
def test_where_nothing_is_to_be_decided_the_runners_settings_stand(config: UBatchConfig) -> None:
    auto = StepSettings(config, None, torch.device("cpu"))
    assert auto.settings(DECODES) == auto.settings(PREFILL) == Proposal()
    with auto.timed(decided(64)):
        pass
    assert (dict(auto.reasons()), auto.policy.timed) == ({}, 0)


def test_a_kind_with_a_threshold_keeps_it() -> None:
    config = UBatchConfig(num_ubatches=3, modes={"prefill": ModeSettings(token_threshold=64)})
    auto = StepSettings(config, None, torch.device("cpu"), kinds=("decode", "prefill"))
    proposal = auto.settings(PREFILL)
    assert proposal.settings is not None
    assert not proposal.no_gain
    assert proposal.settings.for_mode(ForwardMode.PREFILL).token_threshold == 64
    assert auto.settings(DECODES).no_gain  # nothing is known yet
    assert proposal.settings.for_mode(ForwardMode.DECODE).schedule.lanes == 3
    assert proposal.settings.for_mode(ForwardMode.DECODE).token_threshold == 3  # if it is not declined, it overlaps
    assert list(auto.reasons()) == ["decode"]


def test_an_idle_rank_knows_the_schedules_of_the_others() -> None:
    own = replace(SCHEDULES["two_batch_decode"].with_lanes(3), name="mine")
    auto = StepSettings(UBatchConfig(modes={"decode": ModeSettings(own)}), None, torch.device("cpu"))
    config, declined, _ = auto.settings(shaped_step([], ForwardMode.IDLE))
    assert not declined
    assert config is not None
    agreed = replace(decided(64, 0), engaged=True, schedule=fingerprint(own.describe()), tokens=((1,) * 3,) * 2)
    assert config.agreed_schedule(agreed, ForwardMode.IDLE).describe() == own.describe()


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), ("decode", "prefill", "verify")),
        (("--dbo-decode-token-threshold", "32"), ("prefill",)),
        (("--dbo-prefill-token-threshold", "512"), ("decode", "verify")),
        (("--dbo-decode-token-threshold", "8", "--dbo-prefill-token-threshold", "64"), ()),
    ],
)
def test_given_thresholds_are_obeyed(words: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    serve = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel"]
    assert read_serve_command("serve", "", [*serve, "--enable-dbo", *words]).engine.dbo_kinds == kinds
    assert read_serve_command("serve", "", serve).engine.dbo_kinds == ()


def test_a_threshold_in_the_file_is_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text("decode:\n  token-threshold: 24\nprefill:\n  schedule: two_batch_prefill\n")
    words = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo"]
    engine = read_serve_command("serve", "", [*words, "--config", str(file)]).engine
    assert engine.dbo_kinds == ("prefill", "verify")


class TwoRanks:
    """Another connection is another group."""

    rank, size, connection = 0, 2, object()

    def usable_connection(self) -> object:
        return self.connection


def test_a_step_that_fails_has_no_time() -> None:
    auto = StepSettings(UBatchConfig(), None, torch.device("cpu"))
    for number in range(8):
        told = auto.settings(DECODES).told
        assert bool(told) == (number % 2 == 1)  # every other one failed
        with suppress(ZeroDivisionError), auto.timed(decided(64, told=told)):
            1 // ((number + 1) % 2)
    assert auto.policy.timed == 4


def test_a_step_is_learned_only_if_every_rank_tells_its_time() -> None:
    auto = StepSettings(UBatchConfig(), TwoRanks(), torch.device("cpu"))  # type: ignore[arg-type]
    for others, timed in (((), 0), ((), 0), (None, 1)):
        told = auto.settings(DECODES).told
        with auto.timed(replace(decided(64, 64), told=(told, told if others is None else others))):
            pass
        assert auto.policy.timed == timed


def test_ranks_begin_anew_after_a_reset() -> None:
    """They may have counted differently when the group broke."""
    group = TwoRanks()
    auto = StepSettings(UBatchConfig(), group, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(3):
        told = auto.settings(DECODES).told
        with auto.timed(decided(64, 64, told=told)):
            pass
    assert auto.policy.timed == 2
    group.connection = object()
    assert auto.settings(DECODES).told == ()
    assert auto.policy.timed == 0


def test_the_old_flag_is_deprecated(tmp_path: Path) -> None:
    """What it decided, `--enable-dbo` decides."""
    words = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo"]
    settings = read_serve_command("serve", "", [*words, "--dbo-auto"]).settings
    assert any(each.startswith("--dbo-auto (true) has no effect: it is gone in the next") for each in settings.notes)
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    with (
        pytest.warns(DeprecationWarning, match="dbo_auto is gone in the next release"),
        ModelRunner(path, num_kv_blocks=8, dbo=UBatchConfig(), dbo_auto=True) as runner,
    ):
        assert list(runner.step_settings.reasons()) == ["decode", "prefill", "verify"]


@pytest.mark.long
def test_statistics_of_an_engine_say_what_is_decided(tmp_path: Path) -> None:
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    scheduler = SchedulerConfig(max_model_len=64)
    with make_runner(EngineOptions(path, dbo=UBatchConfig(), dbo_kinds=("decode",), scheduler=scheduler)) as runner:
        told = make_core(EngineOptions(path, scheduler=scheduler), runner).statistics().dbo_auto
    assert told == {"decode": "serial: nothing is measured yet"}


# -- the runner -----------------------------------------------------------------------------------------------------


MEASURED: list[Stages] = []


class Optimist(Policy):
    """Told that lanes take half the time."""

    def learn(self, step: Seen, stages: Stages) -> bool:
        if not step.overlapped:
            MEASURED.append(stages)
        made_up = Stages(0.5) if step.overlapped else Stages(1.0, 0.2, 0.2, 0.3, 0.3, layers=4)
        return super().learn(step, made_up)


def decode_steps(rank: int, world_size: int, path: str) -> dict[str, object]:
    """Two ranks decode; the times are made up."""
    group = CommGroup.from_process_group(timeout_s=20)
    MEASURED.clear()
    dbo = UBatchConfig(modes={"prefill": ModeSettings(token_threshold=4)})
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=dbo) as runner:
        step_settings.Policy = Optimist
        runner.step_settings = StepSettings(runner.dbo, group, runner.device)
        tokens, modes = run_steps(runner, rank)
        policy = runner.step_settings.policy
        overlapping = {size: own.overlaps for size, own in policy.kinds["decode"].sizes.items()}
        found = {"timed": policy.timed, "overlapping": overlapping}
        declined = runner.statistics().declined
    return {"tokens": tokens, "modes": modes, "found": found, "declined": declined, "measured": list(MEASURED)}


def plain_steps(rank: int, world_size: int, path: str) -> list[object]:
    group = CommGroup.from_process_group(timeout_s=20)
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=UBatchConfig(enable_dbo=False)) as runner:
        assert not runner.step_settings.reasons()
        return run_steps(runner, rank)[0]


def run_steps(runner: ModelRunner, rank: int) -> tuple[list[object], list[tuple[bool, int]]]:
    """A prefill and 49 decodes; the new tokens, and whether each step overlapped, in how many lanes."""
    requests = admitted(runner, [[1 + rank, 2, 3]] * (8 if rank else 9))
    outputs = [
        step(runner, [ScheduledRequest(each, each.num_uncomputed_tokens) for each in requests]) for _ in range(50)
    ]
    modes = [(output.decision.engaged, output.decision.num_lanes) for output in outputs]
    return [output.tokens for output in outputs], modes


def test_two_ranks_decide_alike(tmp_path: Path) -> None:
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    first, second = run_ranks(decode_steps, 2, str(path))
    assert first["modes"] == second["modes"]
    assert first["found"] == second["found"]
    assert first["modes"][0] == (True, 2)  # the prefill, by its own threshold
    assert not first["modes"][1][0]  # decodes begin serially
    assert first["modes"][-1][0]
    assert first["found"]["overlapping"] == {8: True}
    assert first["found"]["timed"] >= 10
    assert set(first["declined"]) == {DeclineReason.NO_GAIN_EXPECTED}
    assert first["measured"] == second["measured"]  # all ranks learn the same of a step
    assert all(each.attention > 0 and each.experts > 0 and each.layers > 0 for each in first["measured"])
    assert all(0 <= each.waits < each.seconds for each in first["measured"])
    reference, _ = run_ranks(plain_steps, 2, str(path))
    assert first["tokens"] == reference


def test_the_old_name_still_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"It is model_runner\.StepSettings"):
        assert model_runner.DboAuto is StepSettings


LAYERS = 4


def arrivals(late: float, *, link: float = 2.0, attention: float = 1.0, experts: float = 3.0) -> list[Arrival]:
    """A serial step that begins at 0: its peers are `late` in every dispatch."""
    found, now = [], 0.0
    for _ in range(LAYERS):
        for name, compute, behind in (("dispatch", attention, late), ("combine", experts, 0.0)):
            launched = now + compute
            now = launched + link + behind
            found.append(Arrival(name, launched, launched, now))
    return found


def stages_of(*rows: tuple[int, ...]) -> Stages:
    found = Stages.of(rows)
    assert found is not None
    return found


def test_the_lateness_of_peers_is_no_time_on_the_link() -> None:
    rows = [row(45.0, 0.0, arrivals(late)) for late in (0.0, 1.5)]
    assert {len(each) for each in rows} == {TOLD_WIDTH}
    stages = stages_of(*rows)
    assert (stages.dispatch, stages.combine, stages.other) == pytest.approx((8.0, 8.0, 0.0))
    assert stages.experts == pytest.approx(12.0)
    assert stages.attention == pytest.approx(4.0 + 45 - 32)  # what follows the last combine, too
    assert stages.layers == LAYERS
    assert stages.waits == pytest.approx(16.0)


def test_the_transports_own_work_is_no_wait_on_cores_that_it_shares() -> None:
    one = [Arrival("dispatch", 1.0, 1.0, 3.0, cpu_s=1.5)]
    waits = [stages_of(row(4.0, 0.0, one, shared_cores=shared)).dispatch for shared in (False, True)]
    assert waits == pytest.approx([2.0, 0.5])


def test_a_shared_expert_between_launch_and_wait_is_compute() -> None:
    stages = stages_of(row(10.0, 0.0, [Arrival("combine", 2.0, 5.0, 6.0)]))
    assert (stages.combine, stages.experts, stages.attention) == pytest.approx((1.0, 5.0, 4.0))


def test_more_layers_than_slots_share_them() -> None:
    many = [Arrival("combine", float(i), float(i), i + 0.5) for i in range(100)]
    assert stages_of(row(100.0, 0.0, many)).combine == pytest.approx(50.0)


def test_the_time_of_a_step_is_unknown_if_one_rank_does_not_tell_it() -> None:
    known = row(4.0, 0.0, arrivals(0.0))
    assert Stages.of((known, ())) is Stages.of(()) is None
    assert stages_of(row(4.0), row(3.0)) == Stages(4.0)  # only the whole time is known, as on a GPU
    assert stages_of(row(4.0, 0.0, ())) == Stages(4.0, attention=4.0)  # nothing travelled, as on one rank


@pytest.mark.parametrize("name", ["mlp_shared_overlap", "two_batch_decode", "single_batch", "single_batch_signalled"])
def test_what_the_simulator_expects(name: str) -> None:
    schedule = SCHEDULES[name]
    nothing = Stages(10.0, 4.0, 6.0, layers=8)
    balanced = Stages(20.0, 4.0, 6.0, 5.0, 5.0, layers=8)
    if schedule.lanes > 1 or schedule.chunks > 1:
        assert expected_log_ratio(nothing, schedule) > 0.05  # splitting costs
    gain = math.exp(-expected_log_ratio(balanced, schedule))
    assert (1.1 if schedule.lanes > 1 else 0.9) < gain < 2.0
    assert expected_log_ratio(Stages(0.0), schedule) == 0.0


def test_operations_of_a_token_and_of_a_pair(tmp_path: Path) -> None:
    """Three layers, the second dense: 48 numbers wide, 4 heads (2 for keys) of 16, 3 of 8 experts of 24."""
    with ModelRunner(make_qwen3_moe_checkpoint(tmp_path), num_kv_blocks=4) as runner:
        cost = runner.split_cost
    attention = 48 * (4 + 2 + 2) * 16 + 4 * 16 * 48
    norms = (4 + 2) * 16  # of queries and keys, kept as a matrix
    sparse = 48 * 8 + 3 * (3 * 48 * 24)
    dense = 3 * 48 * 40
    assert cost.per_token == 2 * (3 * (attention + norms) + 2 * sparse + dense)
    assert cost.per_pair == 3 * 4 * 4 * 16
    assert cost.of(2, 5) == 2 * cost.per_token + (6 + 7) * cost.per_pair


def test_a_token_costs_no_more_pairs_than_its_window(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Mixtral", sliding_window=5), num_kv_blocks=4) as runner:
        cost = runner.split_cost
    assert cost.of(2, 4) == 2 * cost.per_token + (5 + 5) * cost.per_pair


def test_latent_attention_costs_its_expanded_heads(tmp_path: Path) -> None:
    """Three layers, 4 heads of 12 + 8 numbers for keys and 10 for values; of 8 experts 3 are chosen, 2 are shared."""
    with ModelRunner(make_checkpoint(tmp_path, "DeepseekV2"), num_kv_blocks=4) as runner:
        cost = runner.split_cost
    attention = 48 * (20 + 24 + 8) + 20 * 4 * (12 + 8) + 24 * 4 * (12 + 10) + 4 * 10 * 48
    sparse = 48 * 8 + 3 * (3 + 2) * 48 * 24
    assert cost.per_token == 2 * (3 * attention + 2 * sparse + 3 * 48 * 40)
    assert cost.per_pair == 3 * 2 * 4 * (12 + 8 + 10)
    assert cost.per_expanded == 3 * 2 * 4 * 24 * (12 + 10)
    assert cost.per_absorbed_pair == 3 * 2 * 4 * (24 + 24 + 8)
    assert cost.of(1, 9) == cost.per_token + 10 * cost.per_absorbed_pair, "a decode expands nothing"
    pairs = 40 * 9 + 40 * 41 // 2
    assert cost.of(40, 9) == 40 * cost.per_token + 9 * cost.per_expanded + pairs * cost.per_pair
    assert cost.per_sent == 0, "one rank sends nothing"
