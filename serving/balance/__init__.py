"""The load of the experts, as the process knows it that has all ranks' counts.

balancer    when experts move, and to where
load_book   load over the last steps, and the placement in force; writes it to a file now and then
"""

from serving.balance.balancer import Balancer
from serving.balance.load_book import ExpertBalance, LoadBook, check_load_out

__all__ = ["Balancer", "ExpertBalance", "LoadBook", "check_load_out"]
