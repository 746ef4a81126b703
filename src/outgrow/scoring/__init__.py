"""Where to grow: how much new units would lower the loss, volume by volume."""
