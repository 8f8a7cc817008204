"""What node 0 provides for a run: its private folder, the store, the socket of the messages, and who may connect."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from socket import socket as Socket

import torch.distributed as dist
import zmq
import zmq.asyncio

from serving.engine.options import EngineOptions
from serving.engine.run_folder import RunFolder
from serving.engine.wire.gate import CurveGate
from serving.engine.wire.messages import Failed, error_kind
from serving.engine.wire.rendezvous import Place, Run, Store, announce_network, check_node, host_store
from serving.engine.wire.secret import CurveKeys, read_secret
from serving.network import admit_no_more, numeric_address
from ubatch import ConfigError

_LOOK_FOR_NODES_S = 0.2


class RunHost:
    """Makes a new folder; `open` begins a run.

    Attributes:
        socket: receives the messages of all ranks and nodes, and sends to them by their identity.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._folder = RunFolder()
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self._gate: CurveGate | None = None
        self._store: Store | None = None
        self._listener: Socket | None = None
        self._closed = False

    def open(self, joined: Callable[[int], object], failed: Callable[[Failed], object]) -> Place:
        """Begin the run; returns where its processes find it.

        Args:
            joined: called on the event loop with the rank of every other node that has started.
            failed: called there if a node has another secret or other settings.

        Raises:
            ConfigError: the secret or the address cannot be used.
        """
        options, loop = self._options, asyncio.get_running_loop()
        announce_network(options)
        secret = read_secret(options.cluster_secret_file)
        store, place, self._listener = host_store(options, self._folder.path)
        self._store = store  # it listens as long as it is kept
        run = Run.open(store, secret)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        run.post_client_address(self._bind(run.curve), options)

        def tell(work: Callable[..., object], *args: object) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(work, *args)

        if options.nnodes > 1:
            args = (partial(check_node, store, secret, options), partial(tell, joined), partial(tell, failed))
            threading.Thread(target=self._check_nodes, args=args, name="nodes", daemon=True).start()
        return place

    def admit_no_more(self) -> None:
        """All ranks have opened the store: nobody else has to. NCCL opens it again, whenever a group is made."""
        if self._listener is not None and self._options.device == "cpu":
            with suppress(OSError):  # the system has no socket filters; ranks have logged that
                admit_no_more(self._listener)

    def close(self) -> None:
        """Close the sockets, and remove the folder."""
        self._closed = True
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=1000)
        self._store = None  # stops listening
        if self._listener is not None:
            self._listener.close()
        self._folder.remove()

    def _bind(self, curve: CurveKeys | None) -> str:
        if self._options.nnodes == 1:
            address = f"ipc://{self._folder.path}/client"
            self.socket.bind(address)
            return address
        if curve is not None:
            self._gate = CurveGate(self._context, self.socket, curve)
        address = numeric_address(self._options.master_addr)  # zmq listens on an address, not on a host's name
        self.socket.setsockopt(zmq.IPV6, ":" in address)
        host = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
        return f"{host}:{self.socket.bind_to_random_port(host)}"

    def _check_nodes(
        self, check: Callable[[int], bool], joined: Callable[[int], object], failed: Callable[[Failed], object]
    ) -> None:
        """Wait for the other nodes, and check that each has this node's secret and settings. A thread's main function:
        the store answers over the network's interface, which may go down."""
        missing = set(range(1, self._options.nnodes))
        while missing and not self._closed:
            for node in sorted(missing):
                try:
                    if check(node):
                        missing.remove(node)
                        joined(node)
                except dist.DistError:  # this process ends
                    return
                except ConfigError as error:
                    rank = node * self._options.local_size
                    failed(Failed(rank, str(error), error_kind(error), "ConfigError"))
                    return
            time.sleep(_LOOK_FOR_NODES_S)
