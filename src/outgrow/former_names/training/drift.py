"""Former place of what these lines import."""

from outgrow.apply.weight_fades import Drift as Drift
