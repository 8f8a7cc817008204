"""Models that transformers shards by itself, wrapped: one rank's checks against the whole model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from ubatch import SpanKind, Trace, UBatchConfig, UBatchWrapper, tracing

NEW = 2

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor-parallel": {"tp_size": 2, "ep_size": 2},
    "data-parallel": {"fsdp_size": 2, "ep_size": 2},
}
"""Two ranks with one batch, and two with batches of their own."""


def load(folder: Path, layout: str | None = None, implementation: str = "auto") -> Any:
    """The model, whole or sharded."""
    if layout is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = DistributedConfig(**LAYOUTS[layout], ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()


def prompts(rank: int, layout: str, *, rows: int = 6, uneven: bool = False) -> Tensor:
    """`[rows, 12]` ids; of batches that differ by rank, uneven ones differ in size too."""
    seed = 0 if layout == "tensor-parallel" else rank
    return torch.randint(1, 60, (rows - uneven - seed * uneven, 12), generator=torch.Generator().manual_seed(seed))


@contextmanager
def wrapped(model: Any, **settings: Any) -> Iterator[UBatchWrapper]:
    intercept = settings.pop("intercept_collectives", False)
    config = UBatchConfig(**{"dbo_prefill_token_threshold": 8, "dbo_decode_token_threshold": 2, **settings})
    wrapper = UBatchWrapper(model, config, intercept_collectives=intercept)
    yield wrapper
    wrapper.close()


def check_calls(whole: Any, wrapper: UBatchWrapper, ids: Tensor) -> Trace:
    """Logits and greedy tokens are the whole model's, of a first call and of one that must overlap; its trace."""
    expected = whole(ids, use_cache=False).logits
    torch.testing.assert_close(wrapper.module(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(wrapper(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
    engaged = wrapper.statistics().engaged
    with tracing() as trace:
        logits = wrapper(ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert wrapper.statistics().engaged == engaged + 1
    return trace


def check_generate(whole: Any, wrapper: UBatchWrapper, ids: Tensor) -> None:
    expected = generate(whole, ids)
    assert torch.equal(generate(wrapper, ids), expected)
    engaged = wrapper.statistics().engaged
    assert torch.equal(generate(wrapper, ids), expected)
    assert wrapper.statistics().engaged == engaged + NEW, "the prefill and every decode"


def generate(model: Any, ids: Tensor) -> Tensor:
    tokens: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW
    )
    return tokens


def hidden_transfers(trace: Trace, name: str | None = None) -> int:
    """Of the transfers (of that name), those that travelled while another lane computed."""
    computing = [span for span in trace.spans if span.kind is SpanKind.COMPUTE]
    transfers = [span for span in trace.spans if span.kind is SpanKind.TRANSFER and name in (None, span.name)]
    return sum(any(_hides(other, transfer) for other in computing) for transfer in transfers)


def _hides(compute: Any, transfer: Any) -> bool:
    return compute.lane != transfer.lane and compute.start < transfer.end and compute.end > transfer.start
