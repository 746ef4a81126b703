"""A package of somebody else's: an operator, a method, a transform and an optimizer, all registered when it is imported."""

import outgrow
from outside_growth.methods import Echo as Echo
from outside_growth.operators import swish_gate as swish_gate
from outside_growth.optimizers import Signum as Signum
from outside_growth.transforms import Vocabulary as Vocabulary

outgrow.register_method("echo", Echo)

__all__ = ["Echo", "Signum", "Vocabulary", "swish_gate"]
