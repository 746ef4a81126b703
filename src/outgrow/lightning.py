"""Growth in Lightning's training loop."""

from outgrow.integrations.lightning.callback import Grow as Grow
from outgrow.integrations.lightning.callback import load as load
