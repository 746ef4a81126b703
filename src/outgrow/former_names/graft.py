"""Former place of what these lines import."""

from outgrow.apply.fold_skips import _revive as _revive
