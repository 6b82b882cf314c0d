"""What a run needs, worked out before it starts."""
