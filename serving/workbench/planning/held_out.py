"""Gates of the planner: its placements against the published algorithm's, on loads that neither has seen.

Both plan for one window of loads and are judged by the next one, window after window, in the predicted time of a
prefill step. A window has parts, each with requests of other topics, and every topic makes other experts popular. The
planner sees the parts, and keeps apart what is busy together; the published algorithm sees their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from moe.balance import PARTS, plan_placement
from moe.placement import ExpertPlacement, Floats
from serving.workbench.arms.skew import layer_skews, zipf_loads
from serving.workbench.planning.constants import load_constants
from serving.workbench.planning.costs import LayerCosts
from serving.workbench.planning.gates import Gate
from serving.workbench.planning.plan import plain_step
from serving.workbench.planning.published_eplb import published_placement
from serving.workbench.planning.shapes import Mode, Workload, read_model

RANKS = (16, 32, 64)
_EXPONENTS = (0.5, 1.0)
_MODEL, _HARDWARE, _TOKENS = "qwen3-30b-a3b", "h100-ib", 8192
_LAYERS, _EXPERTS, _REDUNDANT = 6, 128, 64
_WINDOWS, _TOKENS_IN_PART = 3, 20_000
_TOPICS, _TOPIC_SPREAD = 8, 0.5
_WORSE = 0.005
"""By how much a predicted step may be slower before that counts."""


def held_out_gates() -> Iterator[Gate]:
    """With 64 redundant experts, and by rearranging alone."""
    for exponent in _EXPONENTS:
        windows = loads_of_topics(exponent)
        for ranks in RANKS:
            for redundant in (_REDUNDANT, 0):
                gain = held_out_gain(windows, ranks, redundant)
                how = f"{redundant} redundant" if redundant else "rearranged"
                name = f"planner over published, EP {ranks}, Zipf {exponent:g}, {how}"
                yield Gate(name, gain, "not below 0", max(0.0, -gain), _WORSE)


def loads_of_topics(exponent: float) -> Floats:
    """`[windows, PARTS, L, E]`: tokens per expert; popularity follows Zipf's law, but for the topics of each part."""
    random = np.random.default_rng(0)
    base = np.log(zipf_loads(_LAYERS, _EXPERTS, exponent))
    topics = random.normal(0.0, _TOPIC_SPREAD, (_TOPICS, *base.shape))
    mixes = random.dirichlet(np.full(_TOPICS, 0.5), (_WINDOWS, PARTS))
    popularity = np.exp(base + np.einsum("wpt,tle->wple", mixes, topics))
    shares = popularity / popularity.sum(axis=-1, keepdims=True)
    return np.asarray(random.multinomial(_TOKENS_IN_PART, shares), dtype=np.float64)


def held_out_gain(windows: Floats, ranks: int, redundant: int) -> float:
    """What the planner gains over the published algorithm, in predicted throughput of prefill steps.

    Args:
        windows: `[windows, parts, L, E]`; all but the last are planned for, and all but the first judge.
        ranks: they divide the experts with the redundant ones.
    """
    layers, experts = windows.shape[2:]
    planned = ExpertPlacement.default(layers, experts, ranks, redundant)
    own_s, published_s = [], []
    for seen, unseen in pairwise(windows):
        planned = plan_placement(seen, planned)
        published = published_placement(seen.sum(axis=0), experts + redundant, ranks)
        own_s.append(_seconds(layer_skews(planned, unseen), ranks, redundant, experts))
        published_s.append(_seconds(layer_skews(published, unseen), ranks, redundant, experts))
    return fmean(published_s) / fmean(own_s) - 1


def _seconds(skews: tuple[float, ...], ranks: int, redundant: int, experts: int) -> float:
    """Of a prefill step in which nothing overlaps; layers repeat."""
    model = replace(read_model(_MODEL), experts=experts)
    of_layers = tuple(skews[layer % len(skews)] for layer in range(model.moe_layers))
    load = Workload(Mode.PREFILL, _TOKENS, 4096, ranks, redundant_experts=redundant, skews=of_layers)
    return plain_step(LayerCosts(model, load_constants().machine(_HARDWARE), load)).seconds
