"""The world of ranks: rank arithmetic, process groups, devices, and what the machine can do."""
