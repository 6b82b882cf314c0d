"""Every model type under tensor and pipeline parallelism, held to one process."""
