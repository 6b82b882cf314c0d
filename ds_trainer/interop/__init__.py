"""Other tools' configs, both ways. Pure."""
