"""Pipeline parallelism: stages cut from a model, schedules of their passes, and what runs them."""
