"""Stand-ins and our calls against the signatures of the installed flashinfer; and its own Python.

That takes, as installed, what the back ends on its kernels plan and run. Only what is compiled is replaced, by modules
that note their arguments. The rest chooses kernels, checks shapes, dtypes and buffers, and keeps plans as on a Hopper
GPU, or for TensorRT-LLM's kernels on Blackwell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_conformance import LIMITS, OVER_FLASHINFER, benches
from flashinfer_cases import BACKENDS, DECODE, EXTEND, MIXED, PREFIX, VERIFY, install, make, padded
from flashinfer_standin import FLASHINFER_VERSION, StandIns
from flashinfer_standin_wrappers import DECODE_PLAN_OPTIONS

from attention import make_attention_backend
from attention.backends import flashinfer_kernels as trtllm_common
from attention.backends.flashinfer import mla as flashinfer_mla
from attention.backends.flashinfer_kernels import FlashInferKernel, find_kernel
from ubatch import ConfigError, ForwardMode

pytestmark = pytest.mark.long
calls_it = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def installed() -> str:
    """The version of the installed flashinfer."""
    module = pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed; `make test` installs it", exc_type=ImportError
    )
    version: str = module.__version__
    return version


def signatures(found: Any) -> dict[str, inspect.Signature]:
    """Of a function, or of a wrapper's methods."""
    if not inspect.isclass(found):
        return {"call": inspect.signature(found)}
    return {name: inspect.signature(getattr(found, name)) for name in ("__init__", "plan", "run")}


@pytest.mark.parametrize("kernel", FlashInferKernel)
def test_stand_ins_have_the_installed_signatures(installed: str, kernel: FlashInferKernel) -> None:
    """Exactly, for the version they were written for; with another one, as far as they go."""
    ours, theirs = signatures(StandIns().find(kernel)), signatures(find_kernel(kernel))
    for name, signature in ours.items():
        mine, other = ({p.name: (p.kind, p.default) for p in s.parameters.values()} for s in (signature, theirs[name]))
        if installed == FLASHINFER_VERSION:
            assert list(mine.items()) == list(other.items())
        else:
            known = {key: other[key] for key in mine if key in other}
            assert all(mine[key] == value for key, value in known.items())
            assert all(default is not inspect.Parameter.empty for key, (_, default) in other.items() if key not in mine)


def binding(find: Callable[[FlashInferKernel], Any]) -> Callable[[FlashInferKernel], Any]:
    """`find`, whose results also bind every call against the installed flashinfer."""

    def find_bound(kernel: FlashInferKernel) -> Any:
        theirs, ours = find_kernel(kernel), find(kernel)
        if not inspect.isclass(ours):

            def call(*args: Any, **kwargs: Any) -> Any:
                inspect.signature(theirs).bind(*args, **kwargs)
                return ours(*args, **kwargs)

            return call

        class Bound(ours):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                inspect.signature(theirs.__init__).bind(self, *args, **kwargs)
                super().__init__(*args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                # The decode wrapper's plan takes any keyword and passes it on.
                inspect.signature(getattr(theirs, "_plan_impl", theirs.plan)).bind(self, *args, **kwargs)
                super().plan(*args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                inspect.signature(theirs.run).bind(self, *args, **kwargs)
                return super().run(*args, **kwargs)

        return Bound

    return find_bound


CASES = {
    f"{bench.kind.name}{', fp8' * fp8}": (bench, fp8)
    for bench in benches()
    for fp8 in (False, True)
    if bench.name in OVER_FLASHINFER and (bench.traits.fp8 or not fp8)
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_our_calls_bind_to_the_installed_functions(installed: str, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Every call of every kind of batch, eager and captured."""
    standins, (bench, fp8) = StandIns(), CASES[case]
    install(monkeypatch, binding(standins.find))
    options: dict[str, Any] = {"fp8": fp8, "block_size": 32}
    drafts = ["chain", "tree"] if bench.traits.tree_mask else ["chain"]
    captured = [
        bench.padded([(5, 1)], 4, 1, mode=ForwardMode.DECODE, **options),
        bench.padded([(5, 3), (6, 1)], 4, 3, mode=ForwardMode.DRAFT_EXTEND, **options),
        *(bench.padded([(5, 3)], 4, 3, drafts=kind, **options) for kind in drafts),
    ]
    for number, batch in enumerate([*captured, *(bench.batch(requests, **options) for requests in (PREFIX, MIXED))]):
        backend = bench.make(batch)
        batch.forward(backend.plan(batch.metadata))
        if number < len(captured):
            backend.init_graph_buffers(LIMITS)
            plan = backend.plan_for_graph(batch.metadata)
            backend.replan(plan, batch.metadata)
            batch.forward(plan)
    assert standins.calls


def test_decode_plan_options_are_flashinfers(installed: str) -> None:
    theirs = find_kernel(FlashInferKernel.DECODE_WRAPPER)
    known = inspect.signature(getattr(theirs, "_plan_impl", theirs.plan)).parameters
    assert set(known) >= DECODE_PLAN_OPTIONS


@pytest.mark.parametrize(
    ("target", "message"), [("flashinfer_that_is_not:x", "Install flashinfer-python"), ("json:nothing", "json.nothing")]
)
def test_missing_kernels_are_named(target: str, message: str) -> None:
    class Missing:
        value = target

    with pytest.raises(ConfigError, match=message):
        trtllm_common.find_kernel(Missing())  # type: ignore[arg-type]


# -- flashinfer's own Python, over compiled modules that note their arguments ------------------------------------------

CUSTOM_MASK = 2
"""`flashinfer.utils.MaskMode.CUSTOM`, which the kernels `fa3` refuse on the device."""
HOPPER_SHARED_MEMORY = (233_472, 232_448)


class Compiled:
    """A compiled module: what it was asked, and an output of zeros."""

    def __init__(self, kernels: str, calls: list[tuple[str, str, Any]]) -> None:
        self._kernels = kernels
        self._calls = calls

    def plan(self, *args: Any) -> list[int]:
        self._calls.append((self._kernels, "plan", None))
        return [0]

    def paged_run(self, *args: Any) -> None:
        """Of prefills, and of decodes on tensor cores: the output, the LSE, then the kind of mask."""
        self._calls.append((self._kernels, "run", args[12]))
        args[10].zero_()

    def run(self, *args: Any) -> None:
        """Of decodes, whose output is the tenth argument, and of latent attention, where it is the ninth."""
        self._calls.append((self._kernels, "run", None))
        args[9 if self._kernels == "decode" else 8].zero_()


@pytest.fixture
def calls(installed: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """What compiled modules are asked for: kernels, call, kind of mask."""
    if tuple(map(int, installed.split(".")[:2])) < (0, 7):
        pytest.skip("written for the Python of flashinfer 0.7")
    from flashinfer import decode, prefill, utils
    from flashinfer.mla._batch_mla import _wrapper
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    found: list[tuple[str, str, Any]] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    for module in (prefill, decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", lambda kernels, *_: Compiled(kernels, found))
    monkeypatch.setattr(decode, "get_batch_decode_module", lambda *_: Compiled("decode", found))
    for module in (fa2_backend, fa3_backend):
        monkeypatch.setattr(module, "get_batch_mla_module", lambda kernels, *_: Compiled(kernels, found))
    for module in (prefill, decode, utils, _fa_common, _wrapper):
        for name, value in {
            "get_compute_capability": (9, 0),
            "device_support_pdl": True,
            "is_sm90a_supported": True,
            "get_device_sm_count": 132,
            "_get_fa_shared_memory_limits": HOPPER_SHARED_MEMORY,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_, value=value: value)
    for module, backend in BACKENDS.items():
        monkeypatch.setattr(module, "WORKSPACE_BYTES", 1 << 20)
        monkeypatch.setattr(backend, "traits", replace(backend.traits, devices=("cpu",)))
    return found


@pytest.fixture
def blackwell(calls: list[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of TensorRT-LLM's kernels, and of the one that rotates and quantises, on that GPU."""
    from flashinfer import decode, prefill, rope
    from flashinfer.mla import _core

    found: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        def note(out: torch.Tensor, *rest: Any) -> None:
            found.append(name)
            out.zero_()

        return note

    names = ("trtllm_paged_attention_decode", "trtllm_paged_attention_context", "trtllm_ragged_attention")
    kernels = SimpleNamespace(**{name: noting(name.removeprefix("trtllm_")) for name in names})
    of_the_gpu = {"get_compute_capability": (10, 0), "device_support_pdl": True, "get_device_sm_count": 148}
    for module in (decode, prefill, _core):
        monkeypatch.setattr(module, "get_trtllm_gen_fmha_module", lambda: kernels)
        for name, value in of_the_gpu.items():
            monkeypatch.setattr(module, name, lambda *_, value=value: value, raising=False)
    monkeypatch.setattr(rope, "_rope_quantize", lambda *_: found.append("rope_quantize"))
    return found


KINDS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODE, {}),
    "prefill": (PREFIX, {}),
    "mixed": (MIXED, {}),
    "extend": (EXTEND, {"mode": ForwardMode.DRAFT_EXTEND}),
    "chain": (VERIFY, {"drafts": "chain"}),
    "tree": (VERIFY, {"drafts": "tree"}),
}
CAUSAL = pytest.mark.parametrize("name", [name for name in KINDS if name != "tree"])


def half(name: str, **options: Any) -> Any:
    """A batch in bfloat16, as on a GPU."""
    requests, own = KINDS[name]
    return make(requests, **own, **options).to(torch.bfloat16)


def over(name: str, *batches: Any) -> Any:
    """The back end over an empty cache for any of the batches."""
    cache = batches[0].empty_cache(max(batch.num_blocks for batch in batches))
    return make_attention_backend(name, batches[0].shape, cache)


@calls_it
@pytest.mark.wide
@pytest.mark.parametrize("heads", [(8, 2, 64), (2, 2, 64)], ids=["tensor-cores", "cuda-cores"])
@pytest.mark.parametrize("fp8", [False, True])
def test_one_back_end_takes_all_batches_in_any_order(
    fp8: bool, heads: tuple[int, int, int], calls: list[tuple[str, str, Any]]
) -> None:
    """A wrapper keeps the kernels of its first plan: those of a prefill take no tree mask."""
    batches = {name: half(name, heads=heads, fp8=fp8) for name in KINDS}
    backend = over("flashinfer", *batches.values())
    for name in [*batches, *reversed(batches)]:
        calls.clear()
        plan = backend.plan(batches[name].metadata)
        assert batches[name].forward(plan).shape == batches[name].q.shape
        [(kernels, _, _), (_, asked, mask)] = calls
        assert asked == "run"
        assert (mask == CUSTOM_MASK) == (name == "tree")
        assert kernels != "fa3" or mask != CUSTOM_MASK


@calls_it
@pytest.mark.wide
@CAUSAL
def test_latent_attention_takes_all_batches(name: str, calls: list[tuple[str, str, Any]]) -> None:
    batch = half(name, mla=True)
    backend = over("flashinfer", batch)
    for _ in range(2):
        batch.forward(backend.plan(batch.metadata))
    assert [asked for _, asked, _ in calls] == ["plan", "run"] * 2


@calls_it
@pytest.mark.parametrize(
    ("mla", "kind"),
    [(mla, kind) for mla in (False, True) for kind in ("decode", "extend", "chain")] + [(False, "tree")],
)
def test_graphs_are_planned_again(kind: str, mla: bool, calls: list[tuple[str, str, Any]]) -> None:
    """Buffers have the sizes, dtypes and layouts that a wrapper wants, and do not overlap."""
    options = KINDS[kind][1] or {"mode": ForwardMode.DECODE}
    queries = 1 if kind == "decode" else 3
    small, large = (
        padded([(prefix, queries)] * 2, queries, mla=mla, **options).to(torch.bfloat16) for prefix in (5, 40)
    )
    backend = over("flashinfer", small, large)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(small.metadata)
    for batch in (small, large):
        backend.replan(plan, batch.metadata)
        batch.forward(plan)
    assert [asked for _, asked, _ in calls] == ["plan", "plan", "run", "plan", "run"]


@calls_it
@pytest.mark.parametrize("fp8", [False, True])
@CAUSAL
def test_tensorrt_llm(name: str, fp8: bool, blackwell: list[str]) -> None:
    batch = half(name, heads=(8, 2, 64), fp8=fp8)
    assert batch.forward(over("trtllm_mha", batch).plan(batch.metadata)).dtype == torch.bfloat16
    assert blackwell == [f"paged_attention_{'decode' if name in ('decode', 'chain') else 'context'}"]
    blackwell.clear()
    batch = half(name, mla=True, fp8=fp8, block_size=32)
    batch = replace(batch, scaled=False)
    batch.forward(over("trtllm_mla", batch).plan(batch.metadata))
    absorbed = ["rope_quantize"] * fp8 + ["paged_attention_decode"]
    expected = {"prefill": ["ragged_attention"] * 2, "mixed": [*absorbed, *["ragged_attention"] * 2]}
    assert sorted(blackwell) == sorted(expected.get(name, absorbed))


# --------------------------------------------------------------------------------------------------- heads of latents


@calls_it
@pytest.mark.parametrize("heads", [1, 2, 8, 16, 32, 64, 128])
def test_with_these_heads_no_key_is_lost(heads: int, calls: list[tuple[str, str, Any]]) -> None:
    """flashinfer refuses lengths at which its kernels would omit a key; with these heads there are none."""
    from flashinfer.mla._batch_mla._backends import _fa_common

    for queries in range(1, 200, 7):
        for prefix in range(0, 200, 9):
            _fa_common._validate_fa_causal_tile_bound(
                [queries], [prefix + queries], heads, "fa3", torch.bfloat16, torch.device("cpu")
            )


@calls_it
@pytest.mark.parametrize("heads", [20, 24, 40, 96])
def test_other_heads_are_refused(heads: int, calls: list[tuple[str, str, Any]]) -> None:
    """Not at the first unlucky length, in the midst of serving."""
    from flashinfer.mla._batch_mla._backends import _fa_common

    def plan_any_prefix() -> None:
        for prefix in range(64):
            _fa_common._validate_fa_causal_tile_bound(
                [64], [prefix + 64], heads, "fa3", torch.bfloat16, torch.device("cpu")
            )

    with pytest.raises(Exception, match="would omit a visible key"):
        plan_any_prefix()
    batch = half("prefill", mla=True)
    shape: Any = replace(batch.shape, num_heads=heads)
    with pytest.raises(ConfigError, match=f"1, 2, 4, 8, 16, 32, 64 or 128 heads, not {heads}.*Choose 'triton'"):
        flashinfer_mla.FlashInferMLABackend(shape, SimpleNamespace(spec=batch.spec, device=torch.device("cpu")))  # type: ignore[arg-type]
