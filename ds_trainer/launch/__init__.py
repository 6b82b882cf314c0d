"""This process's rank: launchers' variables, SLURM, rank arithmetic, signals. Pure."""
