"""The algebra that fills new units: one file per method."""
