"""Predict steps on machines that are not at hand, from cost tables, the runtime's own schedules and the simulator.

`ubatch simulate` is the command. `constants.yaml` holds every constant with its source.
"""

from serving.workbench.planning.constants import Constants, Hardware, load_constants
from serving.workbench.planning.costs import LaneCosts, LayerCosts
from serving.workbench.planning.gates import Gate, published_gates
from serving.workbench.planning.plan import Plan, make_plan
from serving.workbench.planning.shapes import ModelShape, read_model
from serving.workbench.planning.steps import Step, plain_step, predict_step
from serving.workbench.planning.workload import Mode, Workload

__all__ = [
    "Constants",
    "Gate",
    "Hardware",
    "LaneCosts",
    "LayerCosts",
    "Mode",
    "ModelShape",
    "Plan",
    "Step",
    "Workload",
    "load_constants",
    "make_plan",
    "plain_step",
    "predict_step",
    "published_gates",
    "read_model",
]
