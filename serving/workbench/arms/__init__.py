"""Measuring steps of a model in several arms: for `ubatch tune` and the benchmarks.

cost_table  step times by tokens, and the thresholds that follow
cells       kinds and sizes of steps to measure, the arms to compare, and a synthetic batch of a cell
steps       runs steps in arms
programs    traced steps as input of the simulator
stages      the time of every stage of a layer, from traced steps; the schedules that the simulator thinks best
"""
