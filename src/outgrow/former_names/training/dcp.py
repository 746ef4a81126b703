"""Former place of what these lines import."""

from outgrow.saving.dcp import history_state as history_state
from outgrow.saving.dcp import regrow as regrow
