"""accelerate: its YAML both ways, its plugins, what its launcher tells the ranks. Pure."""
