"""Where the processes of an engine meet: a store on node 0, kept by the launching process.

    "client"        where the client listens: its zmq address
    "turns/RANK"    where a tensor-parallel follower hears its leader: a zmq address
    "ranks/N/..."   a torch.distributed group of ranks that step together: 0 where all share experts, else one per
                    data-parallel rank

The launching process outlives every rank, so a rank that dies takes no store with it. All of this trusts its network:
whoever reaches the ports of node 0 can take part.
"""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

from serving.engine.options import EngineOptions
from ubatch import ConfigError, UBatchError

__all__ = [
    "choose_interface",
    "client_address",
    "connect_store",
    "host_store",
    "init_ranks",
    "post_client_address",
    "post_turns_address",
    "turns_address",
]

_PATIENCE = timedelta(minutes=5)
"""How long nodes and ranks wait for each other at the start."""
_CLIENT = "client"


def host_store(options: EngineOptions) -> dist.TCPStore:
    """Start the store, on node 0; its `port` is the one to connect to.

    Raises:
        ConfigError: the address or port cannot be listened on.
    """
    host, port = options.master_addr, options.master_port
    try:
        listener = socket.create_server((host, port))  # left alone, the store listens on every address
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for the rendezvous ({error.strerror}). master_addr must be an address of "
            f"this machine, and master_port a free port."
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_PATIENCE,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the store of node 0.

    Raises:
        UBatchError: nobody answers there.
    """
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    except RuntimeError as error:
        raise UBatchError(f"node 0 does not answer at {host}:{port} ({_first_line(error)}). Is it running?") from error


def post_client_address(store: dist.Store, address: str) -> None:
    """Tell the ranks where the client listens."""
    store.set(_CLIENT, address)


def client_address(store: dist.Store) -> str:
    """Where the client listens; waits until it does."""
    return store.get(_CLIENT).decode()


def post_turns_address(store: dist.Store, rank: int, address: str) -> None:
    """Tell a follower's leader where it listens."""
    store.set(f"turns/{rank}", address)


def turns_address(store: dist.Store, rank: int) -> str:
    """Where a follower listens; waits until it does."""
    return store.get(f"turns/{rank}").decode()


def init_ranks(store: dist.Store, rank: int, options: EngineOptions) -> None:
    """Join torch.distributed's default group, of the ranks that step with this one; every rank must call it."""
    if options.nnodes > 1:
        choose_interface(options.master_addr)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"ranks/{rank // options.step_size}", store),
        rank=rank % options.step_size,
        world_size=options.step_size,
        timeout=_PATIENCE,
    )


def choose_interface(master_addr: str) -> None:
    """Let gloo and NCCL use the network interface that leads to node 0, where the user has not chosen one.

    Left alone, gloo takes the address that the host's name resolves to, often one that no other machine reaches.
    """
    wanted = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    interface = _interface_towards(master_addr) if wanted else None
    if interface is not None:
        os.environ.update(dict.fromkeys(wanted, interface))


def _interface_towards(host: str) -> str | None:
    """The interface whose address packets to `host` carry; None where it cannot be told."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it only looks up the route
        except OSError:
            return None
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")
