"""What is planned before a rank starts: checkpoint headers, plans of both parallel axes, schedules, memory. Pure."""
