"""How things print: tables, and lines beside progress bars."""
