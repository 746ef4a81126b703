"""Modules that a growth may add to a model: folded residuals, blocks, branches, gates."""
