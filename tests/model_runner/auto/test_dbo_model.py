"""What `--dbo-auto` believes about step times: what one step tells about others, outliers, and a world that changes."""

from __future__ import annotations

import math
import random

import pytest

from model_runner.auto.dbo_model import Seen, StepModel
from ubatch.schedules.cost_table import SERIAL_ARM

ARMS = {"decode": ("2", "3"), "prefill": ("2", "3")}


def believed(model: StepModel, kind: str, arm: str, tokens: int) -> tuple[float, float]:
    """log(arm / serial), and how sure it is."""
    difference = model.difference(kind, arm, SERIAL_ARM, tokens)
    return float(model.expected([difference])[0]), float(model.doubts([difference])[0])


def serve(model: StepModel, kind: str, tokens: int, seconds: float, steps: int, spread: float = 0.05) -> None:
    """Serial steps, sixteen at once."""
    draw = random.Random(tokens)
    step = Seen(kind, tokens, tokens, SERIAL_ARM)
    for _ in range(steps // 16):
        model.pass_time(16)
        model.see([(step, seconds * math.exp(draw.gauss(0.0, spread))) for _ in range(16)])


def test_a_step_tells_about_other_sizes_arms_and_kinds() -> None:
    model = StepModel(ARMS)
    cells = [
        ("decode", "2", 64),
        ("decode", "2", 128),
        ("decode", "2", 1024),
        ("decode", "3", 64),
        ("prefill", "2", 64),
    ]
    before = [believed(model, *cell) for cell in cells]
    serve(model, "decode", 64, 0.03, 64)
    model.see([(Seen("decode", 64, 64, "2"), 0.02)], tried=True)
    after = [believed(model, *cell) for cell in cells]
    moved = [old[0] - new[0] for old, new in zip(before, after, strict=True)]
    assert after[0][0] == pytest.approx(math.log(2 / 3), abs=0.1)
    assert moved[0] > moved[1] > moved[2] > 0.1  # the closer the more
    assert moved[0] > moved[3] > moved[4] > 0.05
    assert all(new[1] < old[1] for old, new in zip(before, after, strict=True))


def test_what_a_step_would_tell_is_what_it_tells() -> None:
    model = StepModel(ARMS)
    serve(model, "decode", 64, 0.03, 64)
    difference, step = model.difference("decode", "3", SERIAL_ARM, 200), Seen("decode", 64, 64, "3")
    [[move]] = model.moves([difference], [step])
    doubt = model.doubts([difference])[0]
    model.see([(step, 0.03)], tried=True)
    assert model.doubts([difference])[0] ** 2 == pytest.approx(doubt**2 - move**2)


def test_a_serial_time_that_drifts_is_not_taken_for_an_arms_merit() -> None:
    """The machine gets slower by half; arms are tried in turn and take as long as serial steps."""
    model = StepModel(ARMS)
    for step in range(40):
        seconds = 0.03 * 1.5 ** (step / 40)
        serve(model, "decode", 64, seconds, 16)
        model.see([(Seen("decode", 64, 64, "2"), seconds)], tried=True)
    assert believed(model, "decode", "2", 64)[0] == pytest.approx(0.0, abs=0.04)


def test_an_outlier_in_use_is_cut_off() -> None:
    model = StepModel(ARMS)
    serve(model, "decode", 64, 0.03, 160)
    step = Seen("decode", 64, 64, SERIAL_ARM)
    model.see([(step, 3.0)])
    [seconds] = model.expected([model.difference("decode", "2", SERIAL_ARM, 64)])
    serve(model, "decode", 64, 0.03, 16)
    model.see([(Seen("decode", 64, 64, "2"), 0.03)], tried=True)
    assert believed(model, "decode", "2", 64)[0] == pytest.approx(0.0, abs=0.06), seconds


def knowing(serial_s: float, two_lanes_s: float) -> StepModel:
    """A belief that has settled, about decodes of 64 tokens."""
    model = StepModel(ARMS)
    serve(model, "decode", 64, serial_s, 64)
    for _ in range(20):
        model.see([(Seen("decode", 64, 64, "2"), two_lanes_s)], tried=True)
        serve(model, "decode", 64, serial_s, 16)
    return model


def test_a_trial_far_from_what_was_expected_is_believed() -> None:
    """The link was replaced: what was known of the arms no longer counts."""
    model = knowing(serial_s=0.03, two_lanes_s=0.02)
    assert believed(model, "decode", "2", 64)[1] < 0.05
    model.see([(Seen("decode", 64, 64, "2"), 0.04)], tried=True)
    assert believed(model, "decode", "2", 64)[0] == pytest.approx(math.log(4 / 3), abs=0.1)


def test_steps_in_use_that_all_take_longer_say_that_something_has_changed() -> None:
    model = knowing(serial_s=0.03, two_lanes_s=0.04)
    known = believed(model, "decode", "2", 64)
    serve(model, "decode", 64, 0.03, 160)
    assert believed(model, "decode", "2", 64) == pytest.approx(known, abs=0.04)
    serve(model, "decode", 64, 0.07, 32)  # the link is slow now
    assert believed(model, "decode", "2", 64)[1] > 0.25
    model.see([(Seen("decode", 64, 64, "2"), 0.05)], tried=True)
    assert believed(model, "decode", "2", 64)[0] == pytest.approx(math.log(5 / 7), abs=0.1)


def test_noise_is_found_out() -> None:
    """The noisier the machine is, the less does one step tell."""
    doubts = []
    for spread in (0.03, 0.25):
        model = StepModel(ARMS)
        serve(model, "decode", 64, 0.03, 1600, spread)
        model.see([(Seen("decode", 64, 64, "2"), 0.03)], tried=True)
        doubts.append(believed(model, "decode", "2", 64)[1])
    assert doubts[0] < 0.08
    assert 0.15 < doubts[1] < 0.3


def test_what_is_known_fades() -> None:
    model = StepModel(ARMS)
    first = believed(model, "decode", "2", 64)
    serve(model, "decode", 64, 0.03, 64)
    model.see([(Seen("decode", 64, 64, "2"), 0.015)], tried=True)
    known = believed(model, "decode", "2", 64)
    model.pass_time(1000)
    later = believed(model, "decode", "2", 64)
    assert known[0] < later[0] < first[0]
    assert known[1] < later[1] < first[1]
    model.pass_time(10**6)
    assert believed(model, "decode", "2", 64) == pytest.approx(first, abs=1e-6)


def test_more_tokens_than_it_has_places_for() -> None:
    model = StepModel(ARMS)
    model.see([(Seen("prefill", 10**6, 10**6, "2"), 1.0)])
    assert believed(model, "prefill", "2", 10**6) == believed(model, "prefill", "2", 1 << 14)
