"""Former place of what these lines import."""

from outgrow.modules.blocks import Parallel as Parallel
from outgrow.modules.blocks import ResidualBlock as ResidualBlock
