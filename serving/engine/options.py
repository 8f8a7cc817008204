"""The settings of an engine, the same on every rank. They can be pickled. `serving.options` checks and derives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model_runner.settings import ModelSettings
from serving.engine.speculation import SpeculationConfig
from serving.scheduler import SchedulerConfig
from ubatch import UBatchConfig


@dataclass(frozen=True)
class RestartLimits:
    """How often engines that have failed are started again.

    Attributes:
        max_engine_restarts: most restarts within the window; one more failure ends the run. 0: the first one does.
        engine_restart_window_s: the window, in seconds.
        resume_timeout_s: how long a new request waits for engines that are started again, in seconds.
    """

    max_engine_restarts: int = 0
    engine_restart_window_s: float = 600.0
    resume_timeout_s: float = 60.0


AUTO_DTYPE = "auto"
"""`EngineOptions.dtype` of a node that takes node 0's."""


@dataclass(frozen=True)
class EngineOptions(ModelSettings):
    """A model, its ranks, and how they run. What is not listed here is in `ModelSettings`.

    Attributes:
        model: folder of a Hugging Face checkpoint.
        dbo: when and how to overlap; its group is set on the rank.
        scheduler: how steps are filled.
        speculation: how draft tokens are proposed, and how many; None for no speculation.
        data_parallel_size: data-parallel ranks over all nodes; each request runs on one of them.
        tensor_parallel_size: processes per data-parallel rank, which share its attention and dense layers. They are on
            one node and consecutive: rank = data-parallel rank * tensor_parallel_size + tensor-parallel rank.
        enable_expert_parallel: all processes share the experts, and step together.
        emulated_link: latency in microseconds and bandwidth in MB/s of an emulated link; None for none.
        dtype: of computation and KV cache; `AUTO_DTYPE` on a node other than node 0, until it has joined.
        moe_backend: `experts_backend` of `ModelRunner`.
        overlap_schedule: schedule the next step while the current one runs; None: on a GPU only.
        profile_folder: where profiles are written; None for a new temporary folder.
        expert_load_out: file that the experts' load is written to, now and then and at the end; None for none.
        restarts: how often engines that have failed are started again; never, by default.
        log_level: of the rank's own log, as in `serving.logs`; None leaves logging unchanged.
        nnodes: number of nodes (machines).
        node_rank: rank of this node.
        master_addr: address at which the other nodes reach node 0.
        master_port: port of the rendezvous store; 0 picks a free one (one node only).
        cluster_secret_file: file with the nodes' shared secret; each process reads it (`serving.engine.wire.secret`).
        job: settings of what the ranks do in place of serving, by name, the same on all nodes; empty if they serve.
    """

    model: Path
    dbo: UBatchConfig = field(default_factory=lambda: UBatchConfig(enable_dbo=False), kw_only=True)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig | None = None
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    moe_backend: str = "auto"
    emulated_link: tuple[float, float] | None = None
    cudagraph_mode: str = field(default="auto", kw_only=True)
    dtype: str = "float32"
    device: str = "cpu"
    overlap_schedule: bool | None = None
    profile_folder: Path | None = None
    expert_load_out: Path | None = None
    restarts: RestartLimits = field(default_factory=RestartLimits)
    log_level: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    cluster_secret_file: Path | None = None
    job: Mapping[str, object] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Total number of processes: data-parallel size x tensor-parallel size."""
        return self.data_parallel_size * self.tensor_parallel_size

    def dp_rank(self, rank: int) -> int:
        """Which data-parallel rank a process belongs to."""
        return rank // self.tensor_parallel_size

    def tp_rank(self, rank: int) -> int:
        """A process's tensor-parallel rank; 0 is the leader."""
        return rank % self.tensor_parallel_size

    def leader(self, dp_rank: int) -> int:
        """The process of a data-parallel rank that talks to the client."""
        return dp_rank * self.tensor_parallel_size

    def describe_rank(self, rank: int) -> str:
        """`rank 3`, or with tensor parallelism `rank 3 (DP 1, TP 1)`."""
        if self.tensor_parallel_size == 1:
            return f"rank {rank}"
        return f"rank {rank} (DP {self.dp_rank(rank)}, TP {self.tp_rank(rank)})"

    @property
    def step_size(self) -> int:
        """How many processes step together, and share the experts: all, or those of a data-parallel rank."""
        return self.world_size if self.enable_expert_parallel else self.tensor_parallel_size

    def together(self, rank: int) -> range:
        """The processes that step with one, itself included."""
        first = rank - rank % self.step_size
        return range(first, first + self.step_size)

    @property
    def local_size(self) -> int:
        """Processes on each node."""
        return self.world_size // self.nnodes

    @property
    def local_ranks(self) -> range:
        """The processes of this node."""
        return range(self.node_rank * self.local_size, (self.node_rank + 1) * self.local_size)

    @property
    def overlaps_schedule(self) -> bool:
        """Whether the overlapped loop runs: if requested, by default on a GPU; never with speculation.

        The next drafts depend on the tokens of a verify step, so the next step cannot be scheduled ahead.
        """
        wanted = self.device != "cpu" if self.overlap_schedule is None else self.overlap_schedule
        return wanted and self.speculation is None
