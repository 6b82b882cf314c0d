"""accelerate: the arguments of its plugins, and conflicts with its launcher's variables. Pure."""
