"""Compare the outputs of a model before and after a growth."""
