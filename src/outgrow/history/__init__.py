"""The growths that a model has been through, their order, and the entries that each of them added."""
