"""Architecture search by growth on CIFAR-10, with its baselines: the same search without inheritance, and from scratch."""
