"""Stand-ins and our calls against the signatures of the installed flashinfer."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from attention_conformance import LIMITS, OVER_FLASHINFER, benches
from flashinfer_cases import MIXED, PREFIX, install
from flashinfer_standin import FLASHINFER_VERSION, StandIns
from flashinfer_standin_wrappers import DECODE_PLAN_OPTIONS

from attention.backends import flashinfer_kernels as trtllm_common
from attention.backends.flashinfer_kernels import FlashInferKernel, find_kernel
from ubatch import ConfigError, ForwardMode

pytestmark = pytest.mark.long


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
