"""Predict steps on machines that are not at hand, from cost tables, the runtime's own schedules and the simulator.

simulate    the command `ubatch simulate`
eplb        the command `ubatch eplb`: a placement of experts for recorded loads
plan        a simulated step; the best schedule for a machine, its token threshold, and what limits it
costs       a roofline model: single kernels on a GPU, dispatch and combine, one lane in one layer
constants   GPUs, kernels, links and models; `constants.yaml` has every number with its source; sizes of a model's
            matrices, and the step that is planned
gates       compares predictions with published measurements, and the planner's placements with the published ones
measured    compares predictions with this machine
"""
