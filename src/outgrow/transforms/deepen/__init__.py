"""Deepen: the places where blocks can be inserted, the new blocks, and checks of the deepened model."""
