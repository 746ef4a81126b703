"""Former place of what these lines import."""

from outgrow.growth_plan.plan import Change as Change
from outgrow.growth_plan.plan import Graft as Graft
from outgrow.growth_plan.plan import Insert as Insert
from outgrow.growth_plan.plan import Insertion as Insertion
from outgrow.growth_plan.plan import Plan as Plan
from outgrow.growth_plan.plan import Rescaling as Rescaling
from outgrow.growth_plan.plan import Rotation as Rotation
from outgrow.growth_plan.plan import Setting as Setting
