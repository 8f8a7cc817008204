"""How many prompt tokens a mixed step takes: given, or from measured times.

On ranks that step together: the same tokens, and the same steps.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from fake_runner import Loop, make_loop, prompt_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from repository import ROOT, TINY_MOE

from model_runner import SamplingParams, Step, make_offer
from serving import LLM
from serving.scheduler.mixed_steps import MeasuredLimit, MixedSteps
from serving.scheduler.request import shares_of
from tests.support.shaped_steps import shaped_step
from ubatch import Decision, ForwardMode, UBatchConfig, decide

pytestmark = pytest.mark.long

PAGE = 16
SIZES = {"num_blocks": 512, "block_size": PAGE, "max_model_len": 1024, "max_num_batched_tokens": 512}


def counts(step: Step) -> tuple[int, int]:
    """Decodes and prompt tokens."""
    prefills = [share.num_tokens for share in shares_of(step) if share.prefill]
    return len(step.shares) - len(prefills), sum(prefills)


def filled(limit: int | str | None, **config: object) -> Loop:
    """Four requests that decode, and prompts behind them."""
    loop = make_loop(**SIZES, max_prefill_tokens_per_mixed_step=limit, **config)  # type: ignore[arg-type]
    for number in range(4):
        loop.add(f"runs{number}", prompt_of(8, number), max_tokens=900, ignore_eos=True)
    loop.step()
    for number in range(4):
        loop.add(f"comes{number}", prompt_of(300, 9 + number), max_tokens=2, ignore_eos=True)
    return loop


# -- a number ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("limit", [16, 40, 300])
def test_a_step_with_decodes_takes_no_more_prompt_tokens_than_the_limit(limit: int, overlapped: bool) -> None:
    loop = filled(limit, overlapped=overlapped)
    most = 0
    while len(loop.outputs) < 8:
        decodes, prefills = counts(loop.step())
        if decodes:
            most = max(most, prefills)
    assert limit - PAGE < most <= limit
    for number in range(4):
        loop.abort(f"runs{number}")
    loop.run()


def test_off_takes_what_there_is_room_for() -> None:
    assert counts(filled(None).step()) == (4, 508)


def test_a_step_without_decodes_is_not_limited() -> None:
    loop = make_loop(**SIZES, max_prefill_tokens_per_mixed_step=16)
    for number in range(4):
        loop.add(f"r{number}", prompt_of(300, number), max_tokens=1)
    assert counts(loop.step()) == (0, 508)  # 300, and up to the end of a page
    assert counts(loop.step())[1] > 500


# -- several ranks ----------------------------------------------------------------------------------------------------


def vote(*ranks: tuple[int, int], period_us: int = 0) -> Decision:
    """Of ranks with so many decodes and prompt tokens."""
    offers = []
    for decodes, prefills in ranks:
        kinds = {
            (False, False): ForwardMode.IDLE,
            (True, False): ForwardMode.DECODE,
            (False, True): ForwardMode.PREFILL,
        }
        mode = kinds.get((bool(decodes), bool(prefills)), ForwardMode.MIXED)
        lens = [1] * decodes + ([prefills] if prefills else [])
        step = shaped_step(lens, mode, [5] * decodes + [0] * bool(prefills))
        offers.append(make_offer(UBatchConfig(enable_dbo=False), step, period_us=period_us)[0])
    return decide(offers)


def test_the_vote_tells_what_of_each_rank_is_of_prompts_and_how_long_the_slowest_took() -> None:
    decision = vote((4, 0), (2, 100), (0, 64), (0, 0), period_us=7)
    assert decision.prefill_tokens == (0, 100, 64, 0)
    assert decision.tokens == ((4,), (102,), (64,), (0,))
    assert decision.period_us == 7
    drafts = shaped_step([4] * 3, ForwardMode.TARGET_VERIFY, [9] * 3)
    assert make_offer(UBatchConfig(), drafts)[0].prefill_tokens == 0


def test_decodes_of_another_rank_limit_the_prompts_of_this_one() -> None:
    limit = MixedSteps(64, PAGE, 512)
    assert limit.room(512, 0) == 512
    for ranks, room in (
        (((0, 512), (0, 300)), 512),  # nobody decodes
        (((0, 512), (4, 0)), 64),
        (((0, 64), (4, 300)), 64),
        (((0, 64), (0, 0)), 512),
    ):
        limit.launched()
        limit.processed(vote(*ranks))
        assert limit.room(512, 0) == room, ranks
    assert limit.room(512, 1) == 64
    assert limit.room(40, 1) == 40


def test_decodes_that_have_ended_here_do_not_limit_what_comes_next() -> None:
    """Neither one's own, nor those that the other processes of the same replica vote for, which are the same."""
    for own, room in ((range(2), 512), (range(2, 4), 64)):
        limit = MixedSteps(64, PAGE, 512, own)
        limit.launched()
        limit.processed(vote((4, 0), (4, 0), (0, 64), (0, 64)))
        assert limit.room(512, 0) == room


@pytest.mark.parametrize("lag", [1, 2])
def test_ranks_come_to_the_same_limit_whatever_their_clocks_say(lag: int) -> None:
    """And with them the processes of a tensor-parallel group: the times are the vote's."""
    rng = random.Random(0)
    ranks = [MixedSteps("auto", PAGE, 512) for _ in range(2)]
    flight: list[Decision] = []
    for _ in range(300):
        rooms = {each.room(500, 8) for each in ranks}
        assert len(rooms) == 1
        prefills = rooms.pop() if rng.random() < 0.7 else 0
        flight.append(vote((8, prefills), (8, 0), period_us=1000 + 10 * prefills))
        for each in ranks:
            each.launched()
        if len(flight) >= lag:
            decision = flight.pop(0)
            for each in ranks:
                each.processed(decision)
    assert ranks[0].room(500, 8) > PAGE


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.wide
@settings(max_examples=20, deadline=None, phases=(Phase.generate,))
@given(
    alone_us=st.integers(500, 50_000), fixed=st.floats(0, 0.8), token_us=st.floats(0.1, 300), overlapped=st.booleans()
)
def test_auto_keeps_mixed_steps_below_three_times_decodes_alone(
    alone_us: int, fixed: float, token_us: float, overlapped: bool
) -> None:
    """Prompts come without end; a step's time has a part of its own for being mixed, and one for every token."""
    limit = MixedSteps("auto", PAGE, 512)
    periods = [0] * (1 + overlapped)
    flight: list[Decision] = []
    given: list[int] = []
    slow = 0
    for _ in range(400):
        prefills = limit.room(504, 8)
        took = int(alone_us * (1 + fixed * bool(prefills)) + token_us * prefills)
        flight.append(vote((8, prefills), period_us=periods.pop(0)))
        periods.append(took)
        limit.launched()
        if len(flight) > overlapped:
            limit.processed(flight.pop(0))
        given.append(prefills)
        slow += prefills > PAGE and took >= 3 * alone_us
    assert slow <= len(given) / 100
    assert sum(map(bool, given)) > 0.9 * len(given), "prompts get on"
    best = (1 - fixed) * alone_us / token_us  # tokens of a step that takes twice as long
    assert max(given) >= min(best * 0.9, 504) - PAGE, "no more is held back than must be"


class Machine:
    """Steps of eight decodes: 10 ms alone, and a time for each prompt token more; `auto` fills them."""

    def __init__(self, decodes: int = 8) -> None:
        self.limit, self.decodes = MeasuredLimit(PAGE, 2048), decodes

    def alone(self, times: int = 1, seconds: float = 0.010) -> None:
        for _ in range(times):
            self.limit.see(self.decodes, 0, seconds)

    def mixed(self, times: int, token_us: float, *, alone_s: float = 0.010) -> None:
        """So many steps; where the limit is 0 there is a page nevertheless."""
        for _ in range(times):
            tokens = self.limit.tokens() or PAGE
            self.limit.see(self.decodes, tokens, alone_s + token_us * 1e-6 * tokens)

    def obeys(self, times: int, token_us: float, late: Sequence[float] = ()) -> list[tuple[int, float]]:
        """The prompt tokens of so many steps, and their times: steps are of decodes alone where the limit is 0, and the
        first of these take `late`."""
        steps, late = [], list(late)
        for _ in range(times):
            tokens = self.limit.tokens()
            seconds = 0.010 + token_us * 1e-6 * tokens
            steps.append((tokens, late.pop(0) if not tokens and late else seconds))
            self.limit.see(self.decodes, *steps[-1])
        return steps


def too_long(steps: Sequence[tuple[int, float]]) -> list[int]:
    """Which mixed steps took three times as long as decodes alone."""
    return [number for number, (tokens, seconds) in enumerate(steps) if tokens and seconds >= 0.030]


def test_auto_begins_with_a_look_at_decodes_alone_and_one_page() -> None:
    machine = Machine()
    assert machine.limit.tokens() == 0
    machine.alone()
    assert machine.limit.tokens() == PAGE


def test_auto_follows_a_load_that_changes() -> None:
    machine = Machine()
    machine.alone(10)
    machine.mixed(60, 100)
    assert 80 <= machine.limit.tokens() <= 112
    machine.mixed(20, 20)
    assert 400 <= machine.limit.tokens() <= 512


def test_auto_looks_again_where_prompts_come_without_end_and_never_for_long() -> None:
    machine = Machine()
    machine.alone()
    given = [tokens for tokens, _ in machine.obeys(1000, 100)]
    assert 10 <= given.count(0) <= 20
    stubborn = MeasuredLimit(PAGE, 2048)  # another rank's prompts, say: no step is ever of decodes alone
    given = []
    for _ in range(1000):
        given.append(stubborn.tokens())
        stubborn.see(8, 64, 0.010)
    assert 0 < given.count(0) < 100
    assert max(given) >= PAGE


def test_one_step_that_was_held_up_changes_nothing() -> None:
    machine = Machine()
    machine.alone(10)
    machine.mixed(40, 100)
    before = machine.limit.tokens()
    machine.limit.see(8, before, 3.0)
    machine.alone(seconds=3.0)
    machine.limit.see(8, before, 0.010 + 0.0001 * before)
    assert machine.limit.tokens() == before


@pytest.mark.parametrize("slow", [5, 200])
@pytest.mark.parametrize("others", [1, 8])
def test_a_slow_first_step_of_decodes_alone_does_not_switch_it_off(slow: int, others: int) -> None:
    """It follows a prompt, and is the likeliest to be slow."""
    machine = Machine(others)
    assert len(too_long(machine.obeys(300, 200, late=[0.010 * slow]))) <= 2
    assert 48 <= machine.limit.tokens() <= 64


def test_a_machine_that_became_faster_is_noticed_soon() -> None:
    machine = Machine()
    machine.alone(40, 0.040)
    assert max(too_long(machine.obeys(300, 200)), default=0) < 40
    assert 48 <= machine.limit.tokens() <= 64


def test_a_mixed_step_that_took_far_too_long_makes_the_next_one_small_at_once() -> None:
    machine = Machine()
    machine.alone(5)
    machine.mixed(20, 10)
    machine.mixed(1, 1000)
    assert machine.limit.tokens() == PAGE


def test_times_of_another_number_of_decodes_serve_until_there_are_some() -> None:
    machine = Machine(40)
    for _ in range(3):
        machine.limit.see(1, 0, 0.002)
        machine.limit.see(64, 0, 0.020)
    machine.mixed(40, 100, alone_s=0.020)
    assert 160 <= machine.limit.tokens() <= 208


# -- ranks -------------------------------------------------------------------------------------------------------------


TEXT = (ROOT / "serving" / "scheduler" / "radix_cache.py").read_text(encoding="utf-8")
PROMPTS = [TEXT[300 * number : 300 * number + 40 + 60 * (number % 9)] for number in range(20)]
PARAMS = [SamplingParams(max_tokens=6 + 5 * (number % 4), ignore_eos=True) for number in range(20)]


def generate(
    prompts: list[str] = PROMPTS, params: list[SamplingParams] = PARAMS, **options: Any
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    with LLM(TINY_MOE, max_num_seqs=6, **options) as llm:
        tokens = [tuple(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
        return tokens, dict(llm.statistics[0].steps)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(140)
def test_mixed_steps_above_the_threshold_overlap_and_smaller_ones_do_not() -> None:
    """Long prompts behind decodes on both ranks, so that nearly every mixed step is as large as the limit lets it."""
    prompts = [TEXT[:40], TEXT[40:80]] * 2 + [TEXT[200 * number :][:900] for number in range(12)]
    params = [SamplingParams(max_tokens=60 if number < 4 else 8, ignore_eos=True) for number in range(16)]
    dbo = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}
    whole = generate(prompts, params)[0]
    for limit, engaged in ((96, True), (32, False)):
        tokens, steps = generate(
            prompts, params, **dbo, dbo_prefill_token_threshold=64, max_prefill_tokens_per_mixed_step=limit
        )
        assert tokens == whole
        assert (steps.get("mixed/engaged", 0) > 0) == engaged, steps
        assert steps.get("mixed/below_prefill_threshold", 0) + steps.get("mixed/peer_declined", 0) > 0, steps


@pytest.mark.ranks
@pytest.mark.timeout(140)
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "fewest"), [("tensor_parallel_size", 10), ("data_parallel_size", 5)])
def test_auto_on_ranks_gives_the_same_tokens(ranks: str, fewest: int) -> None:
    """Each has a clock of its own; where tensor-parallel ones planned other steps, the engine would stop."""
    own: dict[str, Any] = {ranks: 2, "enable_expert_parallel": True, "max_prefill_tokens_per_mixed_step": "auto"}
    tokens, steps = generate(**own)
    assert tokens == generate()[0]
    assert sum(count for kind, count in steps.items() if kind.startswith("mixed/")) > fewest, steps
