"""Deepen: where blocks can be inserted, which ones, and what the model looks like afterwards."""
