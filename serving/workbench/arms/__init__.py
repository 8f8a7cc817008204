"""Measuring steps of a model in several arms: for `ubatch tune` and the benchmarks.

cells       kinds and sizes of steps to measure, the arms to compare, a synthetic batch of a cell; step times by tokens,
            and the thresholds that follow
programs    traced steps as input of the simulator
stages      runs steps in arms; the time of every stage of a layer; the schedules that the simulator thinks best
"""
