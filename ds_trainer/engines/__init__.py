"""Engines: what differs between DeepSpeed, DDP and others in one training step. Each is a plug-in."""
