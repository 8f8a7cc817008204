"""The notes of a wrapper on its steps in a trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from wrapper_cases import Model, x_of
from wrapping import FIRST, Plain, wrapped

from ubatch import ForwardContext, ForwardMode, set_forward_context, tracing
from ubatch.trace.spans import StepNote, note_outcome, note_step, traced_step


@torch.inference_mode()
def test_every_step_has_a_note() -> None:
    thresholds = {"dbo_prefill_token_threshold": 4, "dbo_decode_token_threshold": 6}
    with wrapped(Model().eval(), **thresholds, **FIRST) as wrapper, tracing() as trace:
        wrapper(x_of(6))
        wrapper(x_of(6))
        wrapper(x_of(3))
        with set_forward_context(ForwardContext(num_tokens=5, mode=ForwardMode.DECODE)):
            wrapper(x_of(5))
    assert [(n.step, n.mode, n.tokens, n.schedule, n.lanes, n.chunks, n.reason) for n in trace.notes] == [
        (1, "prefill", 6, "mlp_shared_overlap", 1, 1, "proved"),
        (2, "prefill", 6, "mlp_shared_overlap", 2, 1, None),
        (3, "prefill", 3, "mlp_shared_overlap", 1, 1, "below_prefill_threshold"),
        (4, "decode", 5, "mlp_shared_overlap", 1, 1, "below_decode_threshold"),
    ]
    for note in trace.notes:
        spans = [span for span in trace.spans if span.step == note.step]
        assert spans
        assert all(note.start <= span.start <= span.end <= note.end for span in spans)
    trace.clear()
    assert (trace.notes, trace.step) == ([], 4)


def test_a_step_that_fails_has_none_and_leaves_none() -> None:
    def forward(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x

    with wrapped(Plain(forward), enable_dbo=False) as wrapper, tracing() as trace:
        with pytest.raises(ValueError, match="three"):
            wrapper(x_of(3))
        with traced_step():
            pass
        wrapper(x_of(2))
    assert [(note.step, note.tokens) for note in trace.notes] == [(3, 2)]


def test_the_last_word_counts_and_without_a_trace_there_is_none() -> None:
    note_step("decode", 3, "s")
    note_outcome(lanes=2)
    with traced_step(), tracing() as trace:
        pass
    assert trace.notes == []
    with tracing() as trace:
        note_outcome(lanes=2)
        with traced_step():
            note_step("decode", 3, "s")
            note_outcome(lanes=2)
            note_outcome(reason="cannot_merge", declined_by=1)
    (note,) = trace.notes
    assert note == StepNote(1, "decode", 3, "s", 1, 1, "cannot_merge", 1, note.start, note.end)
