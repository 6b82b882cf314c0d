"""The machine: doctor, DeepSpeed's compiled ops, checks of memory and disk before a run, swap folders."""
