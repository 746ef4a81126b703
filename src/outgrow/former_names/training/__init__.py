"""Former place of what these files import."""
