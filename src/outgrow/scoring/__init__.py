"""Where to grow: how much new units or blocks would lower the loss, volume by volume and place by place."""
