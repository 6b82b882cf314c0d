"""Process groups, rendezvous, consensus of ranks, devices."""
