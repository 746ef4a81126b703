"""Hold somebody's model and what trains it: run it, look into it, leave no trace. Nothing here knows of growth."""
