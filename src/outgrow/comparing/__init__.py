"""The paper's table 1 for a place in your own model: what each method needs and does there."""
