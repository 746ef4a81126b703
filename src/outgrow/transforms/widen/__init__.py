"""Widen: choose volumes, sizes and methods, make the plan, and fit the model's Python attributes to it."""
