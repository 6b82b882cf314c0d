"""Megatron-style tensor parallelism for stock Hugging Face models: layers, plans, and their application."""
