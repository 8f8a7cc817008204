"""Resolves `auto` to the back ends of experts and attention: the same on every rank, with the reason in the log. It
also says which weights stay in fp8.

On a GPU all ranks measure at the same time which usable back end is fastest (`moe.experts.registry`,
`attention.backends.registry`). Only back ends that every rank can use count, and the first rank's choice holds for all:
otherwise some ranks might capture their steps and others not, or one rank's slow choice would delay every step. If the
choice fails on a rank, all choose again among the back ends that work on every rank. On a CPU, where nothing is
captured, every rank chooses for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

from attention import (
    AttentionShape,
    KVCache,
    MLAShape,
    attention_backends,
    fastest_attention_backend,
    usable_attention_backends,
)
from model_runner.decoder.base import ModelConfig
from model_runner.weights.quantization import MXFP4, WeightQuantization
from moe import (
    All2All,
    ExpertsNeeds,
    ExpertsShape,
    check_takes_biases,
    experts_backends,
    experts_class,
    fastest_cpu_experts,
    fastest_experts,
    fp8_block,
    fp8_linear_block,
    usable_experts,
)
from ubatch import CommGroup, ConfigError, ForwardMode, Schedule, UBatchConfig
from ubatch.kernels import Chosen, measured
from ubatch.ranks import taking_long

_logger = logging.getLogger(__name__)
_Fastest = Callable[[Sequence[str]], Chosen]


def resolve_experts(
    name: str,
    config: ModelConfig | None,
    all2all: All2All,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dbo: UBatchConfig | None = None,
    group: CommGroup | None = None,
    quantization: WeightQuantization | None = None,
) -> str:
    """The experts' back end: `auto` is resolved, any other name is returned. With a group on a GPU it is collective.

    Args:
        device: device of the weights; they are not loaded yet, so its memory is free for measuring.
        group: the ranks that choose together; None for a rank that chooses alone.
        quantization: of the checkpoint. `auto` prefers back ends that keep its experts in fp8: with others they take
            twice the memory.

    Raises:
        ConfigError: no back end can be used on every rank, or none works here.
        PeerFailed, TransferTimeout, GroupBroken: see `CommGroup.least`.
    """
    width = None if config is None else config.expert_intermediate_size
    if config is None or width is None:  # nothing to measure
        by_default = fastest_cpu_experts(dtype, device) if device.type == "cpu" else "triton"
        return by_default if name == "auto" else name
    if config.biased_experts and name != "auto":
        check_takes_biases(name)
    overlapping = _overlapping(dbo)
    signalled = any(schedule.signalled for schedule in overlapping)
    if name == "auto":
        held, num_slots = len(all2all.experts), all2all.num_experts  # the same on every rank, idle slots too
        shape = ExpertsShape(held, num_slots, config.num_experts_per_tok, config.hidden_size, width)
        needs = ExpertsNeeds(
            batched=all2all.traits.batched,
            signals=signalled and not all2all.traits.sends_blocks,
            blocks=signalled and all2all.traits.sends_blocks,
            obeys_sms=any(schedule.comm_sms for schedule in overlapping),
            biases=config.biased_experts,
        )
        usable = usable_experts(shape, dtype, device, needs)
        if quantization is not None:
            names = [each for each, why in usable.items() if why is None]
            in_fp8 = [each for each in names if _why_not_fp8(each, config, quantization, device, signalled) is None]
            if in_fp8:
                usable |= {each: f"it needs the fp8 experts in {dtype}" for each in names if each not in in_fp8}
        fastest = partial(fastest_experts, shape=shape, dtype=dtype, device=device)
        together = group if measured(device) else None
        name = _choose("experts back end", experts_backends(), usable, fastest, together)
    if measured(device) and any(schedule.comm_sms for schedule in overlapping) and not experts_class(name).obeys_sms:
        _logger.warning(
            "experts back end %s takes all SMs, though a schedule reserves some for communication. Set comm_sms to 0, "
            "or choose experts that keep to their share, such as 'triton'.",
            name,
        )
    return name


class FP8Blocks(NamedTuple):
    """The blocks in which a checkpoint's weights stay in fp8; None for those that are dequantised.

    Attributes:
        experts: routed experts, see `ExpertParallel.fp8_block`.
        projections: linear layers of attention, dense MLPs and shared experts, see `Checkpoint.projection_block`.
    """

    experts: tuple[int, int] | None = None
    projections: tuple[int, int] | None = None


def resolve_fp8_blocks(
    name: str,
    config: ModelConfig | None,
    quantization: WeightQuantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dbo: UBatchConfig | None = None,
) -> FP8Blocks:
    """Which of a checkpoint's weights stay in fp8, with the reasons why others are dequantised in the log.

    Args:
        name: the experts' back end, from `resolve_experts`.
        config: of the model; None for a network without experts.
        dtype: what all other weights are dequantised to.

    Raises:
        ConfigError: the back end is unknown.
    """
    if quantization is None:
        return FP8Blocks()
    reasons = {"projections": _why_not_fp8_projections(name, quantization, device)}
    if config is not None and config.num_experts:
        signalled = any(schedule.signalled for schedule in _overlapping(dbo))
        reasons = {"routed experts": _why_not_fp8(name, config, quantization, device, signalled), **reasons}
    kept = [kind for kind, why in reasons.items() if why is None]
    others = "; ".join(f"{kind} become {dtype}: {why}" for kind, why in reasons.items() if why is not None)
    if kept:
        _logger.info("%s stored in fp8 stay so%s", " and ".join(kept), f"; {others}" if others else "")
    else:
        _logger.info("quantised weights are dequantised to %s: %s", dtype, next(iter(reasons.values())))
    return FP8Blocks(*(quantization.block if kind in kept else None for kind in ("routed experts", "projections")))


def _why_not_fp8_projections(name: str, quantization: WeightQuantization, device: torch.device) -> str | None:
    """Why the checkpoint's projections cannot stay in fp8; None if they can, as far as their own sizes permit."""
    # A CPU interprets the kernel, for tests, where it interprets the experts' kernels.
    block = fp8_linear_block(device) if device.type == "cuda" or fp8_block(name, device) is not None else None
    if block is None:
        return f"fp8 is multiplied by Triton on GPUs of compute capability 8.9 or newer, not on {device}"
    return _why_not_blocks(quantization, block, "those of projections")


def _why_not_fp8(
    name: str, config: ModelConfig, quantization: WeightQuantization, device: torch.device, signalled: bool
) -> str | None:
    """Why the checkpoint's experts cannot stay in fp8 on this back end; None if they can."""
    if quantization.method == MXFP4:
        return "no experts here multiply MXFP4"
    block = fp8_block(name, device)
    if block is None:
        return f"experts back end {name!r} does not multiply fp8 here"
    other_blocks = _why_not_blocks(quantization, block, f"those of experts back end {name!r}")
    if other_blocks is not None:
        return other_blocks
    sizes = config.hidden_size, config.expert_intermediate_size
    if any(size is None or size % length for size in sizes for length in block):
        return f"blocks of {block} do not divide the experts' sizes {sizes}"
    if signalled:
        return "no down projection in fp8 signals its blocks, as a schedule wants"
    return None


def _why_not_blocks(quantization: WeightQuantization, block: tuple[int, int], whose: str) -> str | None:
    if quantization.block == block:
        return None
    given = "no blocks" if quantization.block is None else f"blocks of {quantization.block}"
    return f"the checkpoint's scales are for {given}, {whose} for blocks of {block}"


def _overlapping(dbo: UBatchConfig | None) -> list[Schedule]:
    """The schedules of all modes that overlap."""
    schedules = [dbo.for_mode(mode).schedule for mode in ForwardMode] if dbo is not None and dbo.enable_dbo else []
    return [schedule for schedule in schedules if schedule.overlaps]


def resolve_attention(
    prefill: str, decode: str, shape: AttentionShape | MLAShape, kv_cache: KVCache, *, group: CommGroup | None = None
) -> tuple[str, str]:
    """Attention back ends for batches with a prefill and for others: `auto` is resolved, any other name is returned.

    Args:
        group: the ranks that choose together; None for a rank that chooses alone.

    Raises:
        ConfigError, PeerFailed, TransferTimeout, GroupBroken: see `resolve_experts`.
    """

    def resolve(name: str, *, decode: bool) -> str:
        if name != "auto":
            return name
        usable = usable_attention_backends(shape, kv_cache)
        what = f"{'decode' if decode else 'prefill'} attention back end"
        fastest = partial(fastest_attention_backend, shape=shape, kv_cache=kv_cache, decode=decode)
        return _choose(what, attention_backends(), usable, fastest, group if measured(kv_cache.device) else None)

    return resolve(prefill, decode=False), resolve(decode, decode=True)


def _choose(
    what: str, known: Sequence[str], usable: Mapping[str, str | None], fastest: _Fastest, group: CommGroup | None
) -> str:
    """The fastest back end that works on every rank, as measured by the first rank.

    Args:
        what: the kind of back end, for messages.
        known: all names, the same on every rank.
        usable: this rank's candidates, the default first, each with the reason why it cannot be used, or None.
        fastest: measures the given names and returns the fastest; called on every rank.
        group: the ranks that choose together; None for a rank that chooses alone.
    """
    left_out = {name: why for name, why in usable.items() if why is not None}
    names = [name for name in usable if name not in left_out]

    def on_every_rank(here: Sequence[str], why_not: str) -> list[str]:
        """Names that all ranks have in `here`; the others go to `left_out` with the reason `why_not`."""
        common = here if group is None else [name for name in known if group.least(float(name in here))]
        left_out.update({name: why_not for name in names if name not in common})
        return [name for name in names if name in common]

    with nullcontext() if group is None else group.step():
        names = on_every_rank(names, "another rank cannot use it")
        while True:
            if not names:
                reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
                raise ConfigError(f"auto finds no {what} that every rank can use ({reasons}). Choose one by name.")
            with taking_long(f"measuring for the {what}"):
                chosen = own = fastest(names)
            if group is None:
                break
            name = known[int(group.least(known.index(own.name) if group.rank == 0 else len(known)))]
            if name != own.name:
                chosen = Chosen(name, f"as rank {group.ranks[0]} found; here {own.name} was the {own.reason}")
            with taking_long(f"trying the {what} {chosen.name}"):
                works = own.works(chosen.name)  # own choice included: it may come from another rank's file
            if group.least(float(works)):
                break
            with taking_long(f"trying every {what}"):
                working = [name for name in names if own.works(name)]
            names = on_every_rank(working, "it fails when it is tried, here or on another rank")
    for name, why in left_out.items():
        _logger.info("%s %s is left out: %s", what, name, why)
    _logger.info("%s: %s, %s", what, chosen.name, chosen.reason)
    return chosen.name
