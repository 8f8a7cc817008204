"""Signalled combines on a GPU: a whole layer, eagerly and in a graph; the copy begins before its projection ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from signalled_cases import ONE, SCHEDULES, Model, inputs, overlapped, tokens_of

from ubatch import CUDAGraphMode, Schedule

pytest.importorskip("triton", reason="Triton is not installed; a CUDA build of torch brings it")

GPU_SIZES, GPU_TOKENS = (16, 2048, 768), 8192  # so many that the host is ahead of what travels


def kernels_at_once(events: Any) -> list[bool]:
    """Of every copy, whether it began before the projection it belongs to had ended."""
    found: dict[str, list[Any]] = {"_down_signalling_kernel": [], "_copy_signalled_kernel": []}
    for event in events:
        for name, spans in found.items():
            if name in event.name and event.device_type == torch.autograd.DeviceType.CUDA:
                spans.append(event.time_range)
    downs, copies = (sorted(spans, key=lambda span: span.start) for spans in found.values())
    assert len(downs) == len(copies) > 0
    return [copy.start < down.end for down, copy in zip(downs, copies, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_on_a_gpu_the_layer_is_right_and_the_copy_runs_beside_the_projection(
    schedule: Schedule, captured: bool
) -> None:
    dtype = torch.bfloat16
    model = Model(sizes=GPU_SIZES, dtype=dtype, device="cuda").eval()
    reference = Model("local", "triton", sizes=GPU_SIZES, dtype=dtype, device="cuda").eval()
    reference.load_state_dict(model.state_dict())
    mode = CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE
    x, is_token = (each.cuda() for each in inputs(GPU_TOKENS, hidden=GPU_SIZES[1]))
    x = x.to(dtype)
    with overlapped(model, schedule, mode) as wrapper, wrapper.no_timeout():
        wrapper(x, is_token)  # compiles
        if captured:
            wrapper.capture(x, is_token)
        for padded in (0, 7, GPU_TOKENS - 48):
            x = torch.randn_like(x)
            is_token = tokens_of(GPU_TOKENS, padded).cuda()
            actual, expected = wrapper(x, is_token).float(), reference(x, is_token).float()
            difference = (actual - expected).norm(dim=1) / expected.norm(dim=1)
            assert difference.max() < 2e-2
            assert torch.equal(wrapper(x, is_token).float(), actual), "a race, or memory that was freed too early"
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiled:
            wrapper(x, torch.ones_like(is_token))
            torch.cuda.synchronize()
        at_once = kernels_at_once(profiled.events())
        # Of several, a later one waits in the stream for those before it to come home, which takes longer.
        assert all(at_once) or schedule is not ONE, at_once
        model.all2all.check()
        assert wrapper.statistics().graph_replays == (7 if captured else 0)
