"""The paper's experiments, a demo, and an honest comparison with training from scratch: `python -m experiments --help`."""
