"""DeepEP between nodes: how many buffers a process may have, and normal and low-latency kernels on the same one.

Four ranks are two nodes of two, for the adapters and for the stand-in, which refuses what DeepEP asserts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deep_ep_standin
import pytest
import torch
from deep_ep_standin_events import calls, place
from deepep_cases import (
    EXPERTS,
    HIDDEN,
    ROOM,
    Stack,
    check_layer,
    close,
    lanes_of,
    layer_of,
    rows_of,
    run_checks,
    tokens_of,
    transport,
)
from deepep_device import deepep_device
from torch import Tensor

from moe.all2all.deepep import base as deepep
from moe.all2all.deepep import buffers as deepep_buffers
from ubatch import CommGroup, ConfigError, ForwardContext, ForwardMode, UBatchWrapper, set_forward_context
from ubatch.streams.graph_protocols import mark_capturing

pytestmark = pytest.mark.ranks

DECODE, PREFILL = ForwardMode.DECODE, ForwardMode.PREFILL


@pytest.mark.slow
def test_one_buffer_between_nodes() -> None:
    run_checks(_both_paths, _as_on_a_device, _captured, _after_a_reset, ranks=4)


def test_another_buffer_is_refused() -> None:
    run_checks(_refused_by_name, ranks=4)


def test_the_standin_refuses_what_deepep_does() -> None:
    run_checks(_what_deepep_asserts, ranks=4)
    run_checks(_within_a_node)


@contextmanager
def _nodes_of_two() -> Iterator[None]:
    """And lanes may share a low-latency buffer, as they must there."""
    with (
        mock.patch.object(place, "node", 2),
        mock.patch.object(deepep, "NODE", 2),
        mock.patch.object(deepep_buffers, "NODE", 2),
        mock.patch.object(deep_ep_standin.Buffer, "shared_by_lanes", True),
    ):
        yield


def _auto(group: CommGroup) -> tuple[Stack, UBatchWrapper]:
    model = Stack([layer_of(seed) for seed in (0, 1)], transport("deepep_auto", group, max_tokens_per_rank=ROOM))
    return model, lanes_of(model, group, "mlp_shared_overlap")


def _step(wrapper: UBatchWrapper, x: Tensor, mode: ForwardMode) -> list[str]:
    """DeepEP's calls of a step whose results are right."""
    calls.clear()
    with set_forward_context(ForwardContext(mode=mode, num_tokens=x.shape[0])):
        close(wrapper(x), wrapper.module.expected(x), str(mode))
    return [what for what, _, _ in calls]


def _both_paths(rank: int, group: CommGroup) -> None:
    """One buffer, cleaned when it is made, and before low latency's kernels where the normal ones ran."""
    with _nodes_of_two():
        _, wrapper = _auto(group)
        for number, (mode, expected) in enumerate(((DECODE, 1), (DECODE, 0), (PREFILL, 0), (PREFILL, 0), (DECODE, 1))):
            called = _step(wrapper, rows_of(5 + rank, rank), mode)
            assert called.count("make") == (number == 0), called
            assert called.count("clean") == expected, called
            assert ("low_latency_dispatch" in called, "dispatch" in called) == (mode is DECODE, mode is PREFILL)
            if expected and number:
                assert called.index("clean") < called.index("low_latency_dispatch"), called
        assert wrapper.statistics().engaged == 5, wrapper.statistics()
        wrapper.close()


def _as_on_a_device(rank: int, group: CommGroup) -> None:
    """Cleaning is ordered after the normal kernels, which run on a stream of their own."""
    with _nodes_of_two():
        model, wrapper = _auto(group)
        x = rows_of(5 + rank, rank)
        wrapper.close()
        with deepep_device() as cuda:
            wrapper = lanes_of(model, group, "mlp_shared_overlap")
            for mode in (PREFILL, DECODE, PREFILL, DECODE):
                _step(wrapper, x, mode)
            wrapper.close()
        cuda.check("normal and low-latency steps in turn")
        assert cuda.deep_ep.clock["deep_ep"] > 0


def _captured(rank: int, group: CommGroup) -> None:
    """A graph cleans at its first launch, as it may be replayed after anything; what was recorded has not run yet."""
    with _nodes_of_two():
        model, wrapper = _auto(group)
        for kernel in model.kernels:
            kernel.experts.capturable = True  # type: ignore[union-attr]
        x = rows_of(5 + rank, rank)
        _step(wrapper, x, DECODE)
        _step(wrapper, x, PREFILL)
        for _ in range(2):
            with mark_capturing():
                called = _step(wrapper, x, DECODE)
            assert [what for what in called if what == "clean" or what.endswith("dispatch")][:2] == [
                "clean",
                "low_latency_dispatch",
            ]
            assert called.count("clean") == 1, called
        assert _step(wrapper, x, DECODE).count("clean") == 1
        assert _step(wrapper, x, DECODE).count("clean") == 0
        wrapper.close()


def _after_a_reset(rank: int, group: CommGroup) -> None:
    """The old buffer is gone before the new one is made, whichever kernels come first."""
    with _nodes_of_two():
        _, wrapper = _auto(group)
        for first, second in ((DECODE, PREFILL), (PREFILL, DECODE)):
            for mode in (first, second):
                _step(wrapper, rows_of(5 + rank, rank), mode)
            group.reset()
        assert _step(wrapper, rows_of(5 + rank, rank), DECODE).count("make") == 1
        wrapper.close()


def _refused_by_name(rank: int, group: CommGroup) -> None:
    """Before DeepEP would end in an assertion; one transport for all layers is enough, and is not refused."""
    layer = layer_of()
    routed = tokens_of(layer, 3 + rank, seed=rank)
    with _nodes_of_two():
        for first, second in (
            ("deepep_low_latency", "deepep_low_latency"),
            ("deepep_low_latency", "deepep_high_throughput"),
            ("deepep_high_throughput", "deepep_low_latency"),
            ("deepep_high_throughput", "deepep_auto"),
        ):
            kernel = layer.kernel(transport(first, group))
            check_layer(kernel, layer, routed, first)
            with pytest.raises(ConfigError, match=r"needs a DeepEP buffer of its own, but .* \('deepep_auto' for"):
                transport(second, group).dispatch(routed.x, routed.ids, routed.weights).wait()
            check_layer(kernel, layer, routed, f"{first} goes on")
            del kernel
        several = [layer.kernel(transport("deepep_high_throughput", group)) for _ in range(2)]
        for kernel in several:
            check_layer(kernel, layer, routed, "normal buffers, which join the same ranks")


def _buffer(group: CommGroup, **options: Any) -> deep_ep_standin.Buffer:
    sizes = {"num_nvl_bytes": 1 << 30, "num_rdma_bytes": 1 << 30, **options}
    return deep_ep_standin.Buffer(group._connection.pg, **sizes)


def _what_deepep_asserts(rank: int, group: CommGroup) -> None:
    with _nodes_of_two():
        low_latency = _buffer(group, low_latency_mode=True)
        with pytest.raises(AssertionError, match="a second low-latency buffer"):
            _buffer(group, low_latency_mode=True)
        with pytest.raises(AssertionError, match="NVSHMEM has joined ranks"):
            _buffer(group)
        low_latency.clean_low_latency_buffer(ROOM, HIDDEN, EXPERTS)
        low_latency.dirty = True
        x, ids = rows_of(2, rank), torch.zeros(2, 2, dtype=torch.int64)
        with pytest.raises(AssertionError, match="on a buffer that normal kernels left dirty"):
            low_latency.low_latency_dispatch(x, ids, ROOM, EXPERTS, use_fp8=False, return_recv_hook=True)
        del low_latency
        normal = _buffer(group)
        with pytest.raises(AssertionError, match="NVSHMEM has joined ranks"):
            _buffer(group, low_latency_mode=True)
        del normal
        _buffer(group, low_latency_mode=True)


def _within_a_node(rank: int, group: CommGroup) -> None:
    """NVSHMEM counts how often it was joined, and normal buffers do not join."""
    made = [_buffer(group, low_latency_mode=True) for _ in range(3)]
    made.append(_buffer(group, num_rdma_bytes=0))
    with pytest.raises(AssertionError, match="RDMA memory within a node"):
        _buffer(group)
