"""Update a library's configuration (`model.config`) after a growth."""
