"""Every model type that has a tensor-parallel plan, split over two ranks and held to one process."""
