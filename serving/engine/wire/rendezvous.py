"""The rendezvous of the processes: a key-value store. With one node, files in the run's folder (`stores`); with
several, node 0's launching process listens.

    "client"        the run's name, the client's zmq address, and node 0's settings (`agreement`)
    "nodes/N"       settings of node N, posted when it starts
    "joined/N"      a counter: how many nodes have joined as node N
    "misfit"        error of a node that ended because its settings differ from node 0's
    "ranks/N/..."   a torch.distributed group of ranks that step together: 0 if all share experts, otherwise one per
                    data-parallel rank

The launching process outlives every rank, so the store stays when a rank dies.

With a cluster secret (`secret`) all values and counters carry a keyed hash (`ubatch.process.job_store`): "client" and
"nodes/N" use a key derived from the secret alone, the others a key derived from the secret and the run's name. So do
what gloo keeps there (`stores`), but not what NCCL does. Without a secret, anyone who reaches the ports of node 0
can take part. A store that listens, gloo and NCCL have no authentication in either case: their network must be private.
"""

from __future__ import annotations

import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist

from serving.engine.kept import KeptOfRank
from serving.engine.options import EngineOptions
from serving.engine.wire.agreement import describe_shape, require_same_shape, settle_dtype
from serving.engine.wire.secret import ClusterSecret, CurveKeys, read_secret
from serving.engine.wire.stores import FolderStore, SignedStore
from serving.logs import log_event
from serving.network import LOOPBACK, choose_interface, listening_store, warn_of_loopback
from ubatch import ConfigError, ForgedValue, TransferTimeout, UBatchError
from ubatch.process.job_store import JobStore, Values, use_job_store

_logger = logging.getLogger(__name__)

PATIENCE = timedelta(minutes=5)
"""How long nodes and ranks wait for each other at the start; a `timedelta`."""
_CLIENT = "client"
_MISFIT = "misfit"


Store: TypeAlias = FolderStore | dist.Store


@dataclass(frozen=True)
class Place:
    """Where the processes of one node find the run.

    Attributes:
        folder: the run's private folder on this node.
        host, port: where node 0's store listens, with several nodes; with one, the store lies in the folder.
        kept: what an earlier process of the rank has left; None where a rank is not started again.
    """

    folder: Path
    host: str = ""
    port: int = 0
    kept: KeptOfRank | None = None


def host_store(options: EngineOptions, folder: Path) -> tuple[Store, Place, socket.socket | None]:
    """Start the store on node 0; errors as for `listening_store`.

    Args:
        folder: the run's.

    Returns:
        The store, where to find it, and a copy of the socket on which it listens, if it does.
    """
    if options.nnodes == 1:
        place = Place(folder)
        return connect_store(place), place, None
    store, listener = listening_store(options.master_addr, options.master_port, PATIENCE)
    return store, Place(folder, options.master_addr, store.port), listener


def connect_store(place: Place) -> Store:
    """Open the store of node 0.

    Raises:
        UBatchError: node 0 does not answer.
    """
    if not place.host:
        return FolderStore(place.folder / "store", PATIENCE)
    try:
        return dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    except RuntimeError as error:
        at = f"{place.host}:{place.port}"
        raise UBatchError(f"node 0 does not answer at {at} ({first_line(error)}). Is it running?") from error


def announce_network(options: EngineOptions) -> None:
    """Log on node 0, in one line, what protects the traffic between the nodes. Does nothing on a single node."""
    if options.nnodes == 1:
        return
    warn_of_loopback(options.master_addr)
    network = f"the network of {options.master_addr} must be private"
    if options.cluster_secret_file is None:
        log_event(
            _logger,
            f"traffic between the nodes is not authenticated: anyone who reaches it can run requests and code here, so "
            f"{network}; with --cluster-secret-file FILE on every node, messages and what we write to the store are "
            "authenticated",
            level=logging.WARNING,
        )
    else:
        log_event(
            _logger,
            f"messages between the nodes are encrypted and authenticated (CURVE), and what we write to the store is "
            f"signed; the store itself, gloo and NCCL cannot authenticate, so {network}",
        )


class Run:
    """One run of the engines, from start to end, as one of its processes sees it.

    Args:
        name: the run's random name, made by node 0.
        address: the client's zmq address; empty on node 0.

    Attributes:
        curve: keys of zmq connections to other machines; None without a secret.
        said: the run's signed part of the store, in which its processes post values.
        of_torch: the store of torch's groups, on a rank that steps with others.
    """

    def __init__(self, store: Store, secret: ClusterSecret | None, name: str, address: str = "") -> None:
        self.store, self.address = store, address
        self._secret, self._name = secret, name
        self.curve: CurveKeys | None = None if secret is None else secret.curve(name)
        self.said = JobStore(store, self.key("run"))
        self.of_torch: dist.Store | None = None

    @classmethod
    def open(cls, store: Store, secret: ClusterSecret | None) -> Run:
        """Begin a new run, on node 0."""
        return cls(store, secret, secrets.token_hex(16))

    def key(self, purpose: str) -> bytes | None:
        """The key for a purpose in this run; None without a secret."""
        return None if self._secret is None else self._secret.key(f"store {purpose}", self._name)

    def post_client_address(self, address: str, options: EngineOptions) -> None:
        """Post the run's name, the client's address and node 0's settings for the ranks and nodes."""
        _lasting(self.store, self._secret).set(_CLIENT, f"{self._name} {address} {describe_shape(options)}")


def join_run(store: Store, options: EngineOptions) -> tuple[Run, EngineOptions]:
    """Join node 0's run, on any node; waits until it has begun.

    Returns:
        The run, and the options with node 0's dtype if they leave it open.

    Raises:
        ConfigError: this node and node 0 have different secrets, or only one of them has a secret; or their settings
            differ.
        UBatchError: node 0 has begun no run within five minutes, or is gone.
    """
    secret = read_secret(options.cluster_secret_file)
    said = _lasting(store, secret)
    try:
        name, address, shape = (*said.get(_CLIENT).split(" ", 2), "", "")[:3]
    except ForgedValue as error:
        raise _other_secret(error, f"node {options.node_rank}", "node 0") from error
    except dist.DistError as error:
        raise UBatchError(
            f"node 0 at {options.master_addr} has not begun its run ({first_line(error)}). Does the same command "
            f"with --node-rank 0, of the same version, still run there, or does something else use its port?"
        ) from error
    try:
        require_same_shape(options, shape, 0)
    except ConfigError as error:
        with suppress(dist.DistError):  # it ends for the same reason
            said.set(_MISFIT, str(error))  # node 0 may not expect this node, and would not look at its settings
        raise
    return Run(store, secret, name, address), settle_dtype(options, shape)


def post_node(store: Store, options: EngineOptions) -> None:
    """Post this node's settings, which also tells node 0 that it has started."""
    said = _lasting(store, read_secret(options.cluster_secret_file))
    said.set(f"nodes/{options.node_rank}", describe_shape(options))


class NodeTaken(ConfigError):
    """A node with the same rank has joined the run already: another one, or this one before it was started again."""


def claim_node(run: Run, node_rank: int) -> None:
    """Take a node rank in a run that this process has joined.

    Raises:
        NodeTaken: another node has joined with the same node rank.
    """
    if run.said.add(f"joined/{node_rank}", 1) > 1:
        raise NodeTaken(
            f"a node with --node-rank {node_rank} has joined node 0's run already. Give every node a rank of its own; "
            f"if this is the same one, started again, start node 0 again, too."
        )


def check_node(store: Store, secret: ClusterSecret | None, options: EngineOptions, node_rank: int) -> bool:
    """Whether a node has started; called on node 0.

    Raises:
        ConfigError: that node and node 0 have different secrets, or only one of them has a secret; or the settings of
            that node, or of a node that node 0 does not expect, differ.
    """
    said, name = _lasting(store, secret), f"nodes/{node_rank}"
    try:
        if said.check([name]):
            require_same_shape(options, said.get(name), node_rank)
            return True
        if said.check([_MISFIT]):
            raise ConfigError(said.get(_MISFIT))
    except ForgedValue as error:
        raise _other_secret(error, "node 0", f"node {node_rank}") from error
    return False


def _lasting(store: Store, secret: ClusterSecret | None) -> JobStore:
    """The part of the store for processes that do not know the run's name yet."""
    return JobStore(store, None if secret is None else secret.key("store"))


def _other_secret(error: ForgedValue, here: str, there: str) -> ConfigError:
    what = str(error).partition(". ")[0]
    return ConfigError(
        f"{here} and {there} do not have the same cluster secret, or another program writes into the store: {what}. "
        f"Give --cluster-secret-file on every node, with a copy of one file; or on none."
    )


def init_ranks(run: Run, rank: int, options: EngineOptions) -> None:
    """Join torch.distributed's default group: the ranks that step with this one. Every rank must call it.

    Raises:
        TransferTimeout: they could not connect: one has ended meanwhile, for example.
    """
    several = options.nnodes > 1
    choose_interface(options.master_addr if several else LOOPBACK, several=several)
    group, store = f"ranks/{rank // options.step_size}", run.store
    values: Values
    if isinstance(store, FolderStore):
        values, run.of_torch = store.part(group), store.torch_store(group)
    else:
        values = run.of_torch = dist.PrefixStore(group, store)
    key = run.key(group)
    use_job_store(key, values)
    if key is not None and options.device == "cpu":  # NCCL reads it in threads, too, which no Python may hold up
        run.of_torch = SignedStore(JobStore(values, run.key(f"torch {group}")), PATIENCE)
    try:
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            store=run.of_torch,
            rank=rank % options.step_size,
            world_size=options.step_size,
            timeout=PATIENCE,
        )
    except RuntimeError as error:
        raise TransferTimeout(f"the ranks could not connect: {first_line(error)}.") from error


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")
