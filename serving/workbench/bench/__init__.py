"""Benchmarks that ship: `ubatch bench handoff`, `ubatch bench lanes`, `ubatch bench overlap`."""

from serving.workbench.bench.statistics import Interval, bootstrap, environment, interleave_arms, paired, write_json

__all__ = ["Interval", "bootstrap", "environment", "interleave_arms", "paired", "write_json"]
