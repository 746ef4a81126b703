"""Growth in training loops that use Accelerate."""

from outgrow.integrations.accelerate import attach as attach
