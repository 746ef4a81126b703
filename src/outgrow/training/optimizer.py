"""Optimizers follow a growth: the names that the rest of training uses. See `outgrow.optimizers`."""

from __future__ import annotations

from outgrow.optimizers.grow import check_optimizers as check_optimizers
from outgrow.optimizers.grow import grow_optimizers as grow_optimizers
from outgrow.optimizers.lookup import state_shape as state_shape
from outgrow.optimizers.lookup import unfollowable as unfollowable
from outgrow.optimizers.lookup import weights_of as weights_of
from outgrow.optimizers.newcomers import THAWED as THAWED
from outgrow.optimizers.newcomers import adopt as adopt
from outgrow.optimizers.newcomers import is_frozen as is_frozen
from outgrow.optimizers.newcomers import thaw as thaw
from outgrow.optimizers.wrappers import held_by as held_by
from outgrow.optimizers.wrappers import unwrapped as unwrapped

ANEW = "make a new optimizer after the growth"
