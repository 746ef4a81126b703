"""Grow checkpoints of other libraries on the disk, tensor by tensor: shapes and plan come from the configuration alone."""
