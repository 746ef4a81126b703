"""Growth inside Lightning's training loop."""
