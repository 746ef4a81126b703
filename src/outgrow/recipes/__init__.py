"""Recipes: schedules and transforms with the settings that did best in our measurements, each with its evidence."""

from outgrow.recipes.reusing import reuse as reuse
from outgrow.recipes.stacking import stack as stack
