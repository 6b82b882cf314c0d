"""Liveness of the ranks: what each is doing, who watches, what a stuck one shows."""
