"""Who this process is among the ranks: environment, SLURM, rank arithmetic, signals. Pure."""
