"""What a growth will do, as data: edits, inserts, settings, how new modules start; and as JSON."""
