"""What is trained: networks, data, arms and what they cost."""
