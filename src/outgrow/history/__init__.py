"""Which growths a model has been through, and which entries came with which."""
