"""The unified config: schema, cross-section rules, reading, resolving, and mapping to each engine. Pure: no torch."""
