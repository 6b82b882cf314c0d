"""Set-up of a run, the training loop, evaluation, generation and export."""
