"""Several processes: DistributedDataParallel, FSDP2, and decisions that all ranks take alike."""
