"""Predict steps on machines that are not at hand, from cost tables, the runtime's own schedules and the simulator.

simulate    the command `ubatch simulate`
plan        the best schedule for a machine, its token threshold, and what limits it
workload    the step that is planned: its kind and sizes on every rank
steps       simulates a step under a schedule
costs       a roofline model of one lane in one layer
kernels     times of single kernels on a GPU
transfers   times of dispatch and combine
routing     number of ranks that hold a token's experts; how chunks raise it
shapes      sizes of a model's matrices
constants   GPUs, kernels, links and models; `constants.yaml` has every number with its source
gates       compares predictions with published measurements
measured    compares predictions with this machine
"""
