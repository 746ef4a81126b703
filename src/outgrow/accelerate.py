"""Growth in loops that Accelerate prepares."""

from outgrow.integrations.accelerate import attach as attach
