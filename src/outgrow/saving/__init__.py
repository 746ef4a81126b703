"""Files, written completely or not at all: weights with their growths, runs, and other libraries' checkpoints."""
