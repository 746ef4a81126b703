"""Several processes: DistributedDataParallel, FSDP2, and decisions that are the same on all ranks."""
