"""What growths cost and cover, measured: `python -m benchmarks.speed`, …; results are in benchmarks/results/."""
