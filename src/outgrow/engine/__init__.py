"""One growth, from the first look at the model to the report."""
