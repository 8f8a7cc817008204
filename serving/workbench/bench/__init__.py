"""What `ubatch bench` measures.

statistics, options  how every one measures, prints and writes
step_setting         a model, a batch and an emulated link, for steps under any schedule
runtime              steps and pieces of them: hand-offs, lanes, experts, attention, overlap, schedules, drafts
server               whole engines and servers, under load and under attack
generate, corpus     whole generations beside transformers', and held-out text
"""

from serving.workbench.bench.statistics import (
    Interval,
    bootstrap,
    environment,
    interleave_arms,
    overlap_figures,
    paired,
    write_json,
)

__all__ = ["Interval", "bootstrap", "environment", "interleave_arms", "overlap_figures", "paired", "write_json"]
