"""DeepSpeed: its keys, the rules of ZeRO, the JSON that a run hands to it. Pure."""
