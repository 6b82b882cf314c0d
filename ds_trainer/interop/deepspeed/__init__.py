"""Configs of DeepSpeed."""
