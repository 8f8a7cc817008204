"""The scheduler: which tokens of which requests each step runs. Pure: no model, no sockets, no threads."""

from serving.scheduler.config import SchedulerConfig, SchedulingPolicy

__all__ = ["SchedulerConfig", "SchedulingPolicy"]
