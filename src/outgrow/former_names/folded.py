"""Former place of what these lines import."""

from outgrow.modules.fold import Fold as Fold
