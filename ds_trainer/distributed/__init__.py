"""Process groups, rendezvous, consensus of all ranks, devices."""
