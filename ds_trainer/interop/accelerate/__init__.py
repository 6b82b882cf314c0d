"""Configs of accelerate."""
