"""Run and inspect a user's model and optimizers without side effects. Nothing here depends on growth."""
