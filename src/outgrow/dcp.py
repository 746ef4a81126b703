"""Growths in checkpoints of `torch.distributed.checkpoint`."""

from outgrow.saving.dcp import history_state as history_state
from outgrow.saving.dcp import regrow as regrow
