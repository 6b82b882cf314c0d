"""The unified config: schema, rules across sections, reading, resolving, and the arguments of each engine. Pure."""
