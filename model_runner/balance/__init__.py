"""Moves experts between ranks while steps run.

slots       the weights of a rank's slots, as bytes; who sends which to whom, and in which pieces
carrier     carries one layer at a time into a staging buffer, and from there into slots
mover       brings the experts to a new placement, one layer after the other
"""

from model_runner.balance.mover import MoveNews, Mover, MoveState, make_mover

__all__ = ["MoveNews", "MoveState", "Mover", "make_mover"]
