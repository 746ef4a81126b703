"""The modules that a growth may leave in a model: folded residuals, blocks, branches, gates."""
