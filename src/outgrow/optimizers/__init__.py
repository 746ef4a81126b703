"""The state that each optimizer class keeps per parameter, and how it grows."""
