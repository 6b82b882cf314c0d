"""The DeepSpeed engine, ZeRO 0 to 3."""
