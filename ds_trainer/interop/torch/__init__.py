"""Plain PyTorch code."""
