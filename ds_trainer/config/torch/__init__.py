"""FSDP2 and DDP: their rules and their arguments. Pure."""
