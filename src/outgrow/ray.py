"""Growth in Ray Tune: population-based training that changes sizes."""

from outgrow.integrations.ray import report as report
from outgrow.integrations.ray import restore as restore
