"""Benchmarks of the runtime, the kernels and one step.

handoff             time of one hand-off between lanes
wrapper             what a wrapped call costs in addition to the module: guard, look-up, decline, cutting a cache
lanes               cost of lanes without anything to overlap
overlap             how much communication is hidden, and how close to the bound
schedules           named schedules, and the best of the search
auto                what `--enable-dbo` decides, against every fixed setting
transformers_step   a model that transformers shards, wrapped and not
experts             experts of a MoE layer, by every back end
attention           attention back ends, and a model against transformers
speculation         guessed tokens against none, and how many verify steps ran in two lanes
"""
