"""FSDP2 and DDP: their rules, their arguments, Python that wraps a model as the engines do. Pure."""
