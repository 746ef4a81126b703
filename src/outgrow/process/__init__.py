"""The Python process: garbage collection and signals."""
