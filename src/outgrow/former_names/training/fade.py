"""Former place of what these lines import."""

from outgrow.modules.gates import Clock as Clock
from outgrow.modules.gates import Gate as Gate
from outgrow.modules.gates import Moving as Moving
from outgrow.modules.gates import PActivation as PActivation
from outgrow.modules.gates import Ramp as Ramp
