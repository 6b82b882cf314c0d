"""Executors: how the micro-batches of one step run on an engine."""
