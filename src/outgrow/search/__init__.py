"""Architecture search by growth, on Optuna: trials grow a trained parent exactly, train briefly, and report objectives."""
