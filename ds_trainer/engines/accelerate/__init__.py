"""Engines on accelerate."""
