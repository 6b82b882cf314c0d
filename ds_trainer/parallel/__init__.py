"""Tensor and pipeline parallelism, and what both need."""
