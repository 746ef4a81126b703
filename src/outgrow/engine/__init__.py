"""One growth, from reading the model to the report."""
