"""The plan of a growth as data (edits, inserted modules, settings, initial values of new modules) and as JSON."""
