"""Families: several sizes of a model on one set of parameters."""
