"""Moves experts between ranks while steps run.

exchange    who sends which slot's weights to whom, and in which pieces
slots       the weights of a rank's slots, as bytes
mover       brings the experts to a new placement, one layer after the other
"""

from model_runner.balance.mover import MoveNews, Mover, MoveState, make_mover

__all__ = ["MoveNews", "MoveState", "Mover", "make_mover"]
