"""Find which units belong together and where they lie in parameters: labels, effects, roles, volumes."""
