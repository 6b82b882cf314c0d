"""The machine: doctor, compiled ops of DeepSpeed, checks before a run, swap folders."""
