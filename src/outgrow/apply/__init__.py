"""Carry a plan out on a model: tensors, inserted modules, settings, fades."""
