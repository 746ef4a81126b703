"""Try before you grow: copies of a model are grown by several candidates and trained briefly on the same batches."""
