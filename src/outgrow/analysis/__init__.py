"""Which units belong together, and where they sit in parameters: labels, effects, roles, volumes."""
