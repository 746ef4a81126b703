"""One rule per operator: which labels its results carry, and what it does to units. One file per family."""
