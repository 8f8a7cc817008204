"""What a command hands to those who do its work: runners, schedulers, sockets, the app, clients. Nothing is started.

`CASES` has a value for every setting of every command that is not its default.
"""

import asyncio
import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from calls import words_of
from served import signals_kept
from torch.distributed import HashStore

import serving.engine.launch as launch
import serving.engine.node as node
import serving.engine.rank.build as build
import serving.engine.wire.rendezvous as rendezvous
import serving.generate as generate
import serving.llm as llm
import serving.serve as serve
import serving.server as server
import serving.workbench.tracing.trace as trace
import serving.workbench.tuning.tune as tune
from moe import ExpertPlacement
from serving.engine.options import AUTO_DTYPE, EngineOptions
from serving.engine.wire.secret import read_secret
from ubatch import UBatchError

Effects = dict[str, Any]


class Enough(Exception):
    """All that is of interest was seen."""


class Seen(dict[str, Any]):
    """What was called with what; a second call of a name is noted after the first."""

    def note(self, name: str, result: Any = None, *, then: type[BaseException] | None = None) -> Callable[..., Any]:
        """A stand-in that notes its arguments, and returns `result` or raises `then`."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.setdefault(name, []).append((args, kwargs))
            if then is not None:
                raise then
            return result

        return called


def _of_runner(seen: Seen, engine: EngineOptions) -> None:
    """The runner of rank 0, its scheduler and its loop."""
    if engine.dtype == AUTO_DTYPE:  # another machine takes node 0's when it joins
        engine = replace(engine, dtype="float32")
    runner = SimpleNamespace(
        streams=SimpleNamespace(asynchronous=False),
        step_settings=SimpleNamespace(reasons=None),
        config=SimpleNamespace(vocab_size=8, eos_token_ids=(0,)),
        expert_loads=SimpleNamespace(counts=torch.zeros(2, 1, 1)),
        placement=ExpertPlacement.default(1, 1, 1),
        mover=None,
        copy_expert_loads=None,
    )
    group = None if engine.step_size == 1 else SimpleNamespace(rank=0, size=engine.step_size)
    with (
        mock.patch.object(build, "ModelRunner", seen.note("runner", runner)),
        mock.patch.object(build, "WeightsBar", return_value=None),
        mock.patch.object(build, "make_scheduler", seen.note("scheduler")),
        mock.patch.object(build, "EngineCore", seen.note("core")),
    ):
        build.make_core(engine, build.make_runner(engine, group))  # type: ignore[arg-type]
    (((model, settings), _),) = seen["runner"]
    seen["runner"] = vars(settings) | {"model": model, "group": engine.step_size}
    ((args, _),) = seen["scheduler"]
    seen["scheduler"] = args[:2]


def _of_ranks(seen: Seen, options: EngineOptions) -> None:
    """The store, and the processes of this machine."""
    seen["restarts"], seen["loads"] = options.restarts, options.expert_load_out
    with contextlib.suppress(UBatchError), tempfile.TemporaryDirectory() as folder:
        rendezvous.host_store(options, Path(folder))
    run = rendezvous.Run.open(HashStore(), read_secret(options.cluster_secret_file))
    seen["messages are encrypted"] = run.curve is not None
    process = mock.MagicMock(side_effect=lambda **how: seen.note("process", mock.MagicMock())(how["name"]))
    with mock.patch.object(launch, "ForkedProcess", process):
        place = rendezvous.Place(Path("run"), options.master_addr, options.master_port)
        launch.LocalEngines(options, place, build.warm_up)  # type: ignore[arg-type]


def of_serve(words: Sequence[str]) -> Effects:
    """Of `ubatch serve`, up to the point where uvicorn would run."""
    seen = Seen()

    @contextlib.contextmanager
    def listening(*where: Any) -> Iterator[Any]:
        seen["listening"] = where
        yield mock.MagicMock()

    async def start(options: EngineOptions, *, engine_main: object) -> Any:
        _of_ranks(seen, options)
        return mock.MagicMock(close=mock.AsyncMock())

    command = serve.read("ubatch serve", "", words)
    with (
        mock.patch.object(serve, "configure_logging", seen.note("logging")),
        mock.patch.object(serve, "log_event", seen.note("log")),
        mock.patch.object(server, "listening", listening),
        mock.patch.object(server.EngineClient, "start", start),
        mock.patch.object(rendezvous.socket, "create_server", seen.note("store", then=OSError)),
        mock.patch.object(node, "RunFolder", return_value=mock.MagicMock(path=Path("run"))),
        mock.patch.object(node, "connect_store", seen.note("store", then=Enough)),
        mock.patch.object(server, "load_tokenizer", seen.note("tokenizer")),
        mock.patch.object(server, "check_chat_template", return_value=None),
        mock.patch.object(server, "make_registry", seen.note("metrics", (mock.MagicMock(), None))),
        mock.patch.object(server, "make_asgi_app"),
        mock.patch.object(server, "create_app", seen.note("app", mock.MagicMock())),
        mock.patch.object(server, "connection_protocol", seen.note("connections", then=Enough)),
        signals_kept(),
        pytest.raises(Enough),
    ):
        serve.run(command)
    for (service,), kwargs in seen.get("app", ()):
        kwargs.pop("metrics_app")
        kwargs["around"] = kwargs["around"].keywords
        kwargs |= {name: getattr(service, name) for name in _OF_SERVICE}
    seen["app"] = [kwargs for _, kwargs in seen.get("app", ())]
    seen["connections"] = [args[0] for args, _ in seen.get("connections", ())]
    seen["metrics"] = [args[0] for args, _ in seen.get("metrics", ())]
    _of_runner(seen, command.engine)
    seen["drains at once"] = command.settings.given("drain_timeout_s") and asyncio.run(_drains_at_once(command))
    return seen


_OF_SERVICE = ["names", "max_waiting_requests", "max_outputs_per_request", "profiles", "log_requests", "max_log_len"]
_OF_SERVICE += ["turns", "max_logprobs", "tokens_as_ids", "force_usage", "response_role", "template_kwargs", "seed"]
_OF_SERVICE += ["defaults"]


async def _drains_at_once(command: Any) -> bool:
    """Whether a server with a request that does not end gives up on it soon after it was told to."""
    life = server._Serve(command, mock.MagicMock(), 1024)
    died: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop: Any = SimpleNamespace(number=15)
    client: Any = SimpleNamespace(num_outstanding=1)
    try:
        await asyncio.wait_for(life._drain(client, mock.MagicMock(), stop, died), 0.06)
    except TimeoutError:
        return False
    return True


def prompts_of(words: Sequence[str]) -> list[str]:
    """Two, where there are none."""
    given = "--prompt" in words or _file_of(words).startswith("prompt:")
    return [] if given else ["--prompt", "a", "b"]


def _file_of(words: Sequence[str]) -> str:
    return Path("settings.yaml").read_text() if "--config" in words else ""


def of_generate(words: Sequence[str]) -> Effects:
    """Of `ubatch generate`: what it says, its prompts, and what the model is made from."""
    command = generate.read("ubatch generate", "", [*words, *prompts_of(words)])
    seen = Seen()
    with mock.patch.object(llm, "LLM") as made, mock.patch.object(node, "run_node", seen.note("node", 0)):
        made.from_settings.return_value.__enter__.return_value = _Generated(seen)
        _silently(lambda: generate.run(command), seen)
    seen.pop("node", None)
    _of_offline(seen, command.engine)
    return seen


class _Generated(SimpleNamespace):
    """Stands in for an `LLM`."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(generate=seen.note("generated", []), statistics={}, memory="")


def _of_offline(seen: Seen, engine: EngineOptions) -> None:
    _of_runner(seen, engine)
    with mock.patch.object(rendezvous.socket, "create_server", seen.note("store", then=OSError)):
        _of_ranks(seen, engine)


def of_trace(words: Sequence[str]) -> Effects:
    """Of `ubatch trace`: what is asked of a server, which files are read, what runs here, and where it writes."""
    source = {"--url", "--files", "--expert-loads"} & set(words)
    source |= {key for key in ("url:", "files:", "expert-loads:") if _file_of(words).startswith(key)}
    command = trace.read("ubatch trace", "", [*words, *([] if source else prompts_of(words))])
    seen, client = Seen(), mock.MagicMock()
    if command.settings["expert_loads"] is not None:
        with mock.patch.object(trace, "loads_of_file", seen.note("loads", then=Enough)), pytest.raises(Enough):
            trace._show_loads(command.settings)
        return seen
    client.__enter__.return_value.post.return_value.json.return_value = {"files": []}
    with (
        mock.patch.object(trace.httpx, "Client", seen.note("client", client)),
        mock.patch.object(trace.time, "sleep", seen.note("sleep")),
        mock.patch.object(trace, "read_chrome", seen.note("file", [])),
        mock.patch.object(trace, "_offline", seen.note("offline", [])),
        mock.patch.object(trace, "_serial_steps", seen.note("serial", [])),
    ):
        trace._record(command)
    seen.pop("offline", None)
    mkdir = mock.patch.object(Path, "mkdir", lambda self, **_: seen.note("folder", then=OSError)(self))
    with mkdir, contextlib.suppress(UBatchError):
        trace._write(command, [], [], [], [], None)
    run = command.run
    if run is not None:
        with mock.patch.object(trace, "_record", return_value=trace.Recorded([], [])):
            _silently(lambda: trace.run(command), seen)
        seen["generated"] = run.command.prompts, run.command.params
        _of_offline(seen, run.command.engine)
    return seen


def of_tune(words: Sequence[str]) -> Effects:
    """Of `ubatch tune`: what the ranks are told to measure, the runner of rank 0, and the processes."""
    seen = Seen()
    command = tune.read("ubatch tune", "", words)
    with (
        mock.patch.object(tune, "_measure", seen.note("measured", then=Enough)),
        mock.patch.object(tune, "run_node", seen.note("node", then=Enough)),
        mock.patch.object(tune, "load_state", return_value=None),
        mock.patch.object(Path, "mkdir"),
    ):
        _silently(lambda: tune.run(command), seen)
    (((_, *main), how),) = seen.pop("measured", None) or seen.pop("node")
    plan, _, path = (how.get("engine_main") or main[0]).args
    seen["plan"] = plan, path
    _of_offline(seen, command.engine)
    return seen


def _silently(run: Callable[[], Any], seen: Seen) -> None:
    """What a command says before it begins."""
    with mock.patch("sys.stderr", new_callable=io.StringIO) as said, contextlib.suppress(Enough):
        run()
    seen["said"] = said.getvalue()


def as_text(effects: Effects) -> dict[str, str]:
    """Each as text, without the addresses of stand-ins."""
    return {key: re.sub(r" id='\d+'| at 0x[0-9a-f]+", "", repr(value)) for key, value in effects.items()}


EFFECTS: dict[str, Callable[[Sequence[str]], Effects]] = {
    "serve": of_serve,
    "generate": of_generate,
    "trace": of_trace,
    "tune": of_tune,
}


@dataclass(frozen=True)
class Case:
    """How to set a setting; the table, `settings_table.yaml`, says what its fields are."""

    words: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    gpus: int = 0
    yaml: str = ""
    off: bool = False


def _case(fields: Mapping[str, Any]) -> Case:
    found = dict(fields)
    for name in {"words", "beside", "without"} & found.keys():
        told = found[name]
        found[name] = tuple(told if isinstance(told, list) else words_of(str(told))[0])
    return Case(**found)


_TABLE = Path(__file__).with_name("settings_table.yaml").read_text(encoding="utf-8")
CASES: Mapping[str, Case] = {name: _case(fields) for name, fields in yaml.safe_load(_TABLE).items()}
