"""Which values new units and blocks may hold so that the model computes the same."""
