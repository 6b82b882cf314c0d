"""DeepSpeed: its keys, the rules of ZeRO, its JSON both ways. Pure."""
