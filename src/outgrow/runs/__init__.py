"""Growth inside a training loop: schedules, triggers, learning rates, logs."""
