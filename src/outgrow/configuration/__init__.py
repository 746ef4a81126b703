"""A library's configuration follows the sizes of its model."""
