"""Where the processes of an engine meet: a store on node 0, kept by the launching process.

    "client"        the run's name, where the client listens (a zmq address), and node 0's settings (`agreement`)
    "nodes/N"       node N is there, with the same secret; its settings
    "joined/N"      a counter: how many have joined as node N
    "misfit"        a node that has joined with other settings than node 0's: why it ended
    "turns/RANK"    where a tensor-parallel follower hears its leader: a zmq address
    "ranks/N/..."   a torch.distributed group of ranks that step together: 0 where all share experts, else one per
                    data-parallel rank

The launching process outlives every rank, so a rank that dies takes no store with it.

With a cluster secret (`secret`) all that is said here carries a keyed hash (`ubatch.process.job_store`): "client" and
"nodes/N" by a key of the secret alone, the rest by keys of the run as well. Without one, whoever reaches the ports of
node 0 can take part. The store itself, gloo and NCCL have no authentication in either case: their network must be
private.
"""

from __future__ import annotations

import logging
import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

from serving.engine.options import EngineOptions
from serving.engine.wire.agreement import describe_shape, require_same_shape
from serving.engine.wire.secret import ClusterSecret, CurveKeys, read_secret
from serving.logs import log_event
from serving.network import choose_interface, listening_store, warn_of_loopback
from ubatch import ConfigError, ForgedValue, UBatchError
from ubatch.process.job_store import JobStore, sign_job_store

__all__ = [
    "Run",
    "announce_network",
    "check_node",
    "claim_node",
    "connect_store",
    "host_store",
    "init_ranks",
    "join_run",
    "numeric_address",
    "post_node",
    "post_turns_address",
    "turns_address",
]

_logger = logging.getLogger(__name__)

_PATIENCE = timedelta(minutes=5)
"""How long nodes and ranks wait for each other at the start."""
_CLIENT = "client"
_MISFIT = "misfit"


def host_store(options: EngineOptions) -> dist.TCPStore:
    """Start the store, on node 0; errors as of `listening_store`."""
    return listening_store(options.master_addr, options.master_port, _PATIENCE)


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the store of node 0.

    Raises:
        UBatchError: nobody answers there.
    """
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    except RuntimeError as error:
        raise UBatchError(f"node 0 does not answer at {host}:{port} ({_first_line(error)}). Is it running?") from error


def announce_network(options: EngineOptions) -> None:
    """Say in node 0's log what protects the traffic between several nodes, in one line. Nothing on a single node."""
    if options.nnodes == 1:
        return
    warn_of_loopback(options.master_addr)
    network = f"the network of {options.master_addr} must be private"
    if options.cluster_secret_file is None:
        log_event(
            _logger,
            f"traffic between the nodes is not authenticated: whoever reaches it can run requests and code here, so "
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
    """One start of the engines, as one of its processes sees it.

    Args:
        store: the rendezvous store.
        secret: the cluster's, if it has one.
        name: drawn by node 0.
        address: where the client listens; on node 0 empty until it does.

    Attributes:
        curve: keys of zmq connections beyond this machine; None without a secret.
        said: what its processes tell each other in the store.
    """

    def __init__(self, store: dist.Store, secret: ClusterSecret | None, name: str, address: str = "") -> None:
        self.store, self.address = store, address
        self._secret, self._name = secret, name
        self.curve: CurveKeys | None = None if secret is None else secret.curve(name)
        self.said = JobStore(store, self.key("run"))

    @classmethod
    def open(cls, store: dist.Store, secret: ClusterSecret | None) -> Run:
        """A new one, on node 0."""
        return cls(store, secret, secrets.token_hex(16))

    def key(self, purpose: str) -> bytes | None:
        """Of a purpose in this run; None without a secret."""
        return None if self._secret is None else self._secret.key(f"store {purpose}", self._name)

    def post_client_address(self, address: str, options: EngineOptions) -> None:
        """Tell the ranks and nodes where the client listens, the run's name, and node 0's settings."""
        self.address = address
        _lasting(self.store, self._secret).set(_CLIENT, f"{self._name} {address} {describe_shape(options)}")


def join_run(store: dist.Store, options: EngineOptions) -> Run:
    """Join node 0's run, on any node; waits until it has begun.

    Raises:
        ConfigError: node 0 has another secret than this node, or one of them has none; or other settings.
        UBatchError: it has begun none in five minutes, or is gone.
    """
    secret = read_secret(options.cluster_secret_file)
    said = _lasting(store, secret)
    try:
        name, address, shape = (*said.get(_CLIENT).split(" ", 2), "", "")[:3]
    except ForgedValue as error:
        raise _other_secret(error, f"node {options.node_rank}", "node 0") from error
    except dist.DistError as error:
        raise UBatchError(
            f"node 0 at {options.master_addr} has not begun its run ({_first_line(error)}). Does `ubatch serve` with "
            f"--node-rank 0 and the same version still run there, or does something else use its port?"
        ) from error
    try:
        require_same_shape(options, shape, 0)
    except ConfigError as error:
        said.set(_MISFIT, str(error))  # node 0 looks only for nodes that it expects
        raise
    return Run(store, secret, name, address)


def post_node(store: dist.Store, options: EngineOptions) -> None:
    """Tell node 0 that this node is there, and its settings."""
    said = _lasting(store, read_secret(options.cluster_secret_file))
    said.set(f"nodes/{options.node_rank}", describe_shape(options))


def claim_node(run: Run, node_rank: int) -> None:
    """Be the node of that rank, in a run that this process has joined.

    Raises:
        ConfigError: another one has joined as the same.
    """
    if run.said.add(f"joined/{node_rank}", 1) > 1:
        raise ConfigError(
            f"a node with --node-rank {node_rank} has joined node 0's run already. Give every node a rank of its own; "
            f"if this is the same one, started again, start node 0 again, too."
        )


def check_node(store: dist.Store, secret: ClusterSecret | None, options: EngineOptions, node_rank: int) -> bool:
    """Whether a node is there, on node 0.

    Args:
        store: the rendezvous store.
        secret: node 0's.
        options: node 0's.
        node_rank: of the node to look for.

    Raises:
        ConfigError: it, or a node that node 0 does not expect, has another secret than node 0, or one of them has none;
            or other settings.
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


def _lasting(store: dist.Store, secret: ClusterSecret | None) -> JobStore:
    """What is said by those that do not know the run yet."""
    return JobStore(store, None if secret is None else secret.key("store"))


def _other_secret(error: ForgedValue, here: str, there: str) -> ConfigError:
    what = str(error).partition(". ")[0]
    return ConfigError(
        f"{here} and {there} do not have the same cluster secret, or somebody else writes into the store: {what}. Give "
        f"--cluster-secret-file on every node, with a copy of one file; or on none."
    )


def post_turns_address(said: JobStore, rank: int, address: str) -> None:
    """Tell a follower's leader where it listens."""
    said.set(f"turns/{rank}", address)


def turns_address(said: JobStore, rank: int) -> str:
    """Where a follower listens; waits until it does."""
    return said.get(f"turns/{rank}")


def init_ranks(run: Run, rank: int, options: EngineOptions) -> None:
    """Join torch.distributed's default group, of the ranks that step with this one; every rank must call it."""
    choose_interface(options.master_addr, several=options.nnodes > 1)
    group = f"ranks/{rank // options.step_size}"
    sign_job_store(run.key(group))
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(group, run.store),
        rank=rank % options.step_size,
        world_size=options.step_size,
        timeout=_PATIENCE,
    )


def numeric_address(host: str) -> str:
    """A host's IPv4 address: zmq listens on a name only if that is an interface's."""
    return socket.gethostbyname(host)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")
