"""Text output: tables, and lines next to progress bars."""
