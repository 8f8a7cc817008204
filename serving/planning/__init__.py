"""Predicting steps of machines that are not here: cost tables, the runtime's own schedules, and the simulator.

`ubatch simulate` is the command. `constants.yaml` holds every constant with its source.
"""

from serving.planning.constants import Constants, Hardware, load_constants
from serving.planning.costs import LaneCosts, LayerCosts
from serving.planning.gates import Gate, published_gates
from serving.planning.plan import Plan, make_plan
from serving.planning.shapes import ModelShape, read_model
from serving.planning.steps import Step, plain_step, predict_step
from serving.planning.workload import Mode, Workload

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
