"""A package of somebody else's: an operator, a method and an optimizer of its own, all registered when it is imported."""

from outside_growth.methods import Echo as Echo
from outside_growth.operators import swish_gate as swish_gate
from outside_growth.optimizers import Signum as Signum

__all__ = ["Echo", "Signum", "swish_gate"]
