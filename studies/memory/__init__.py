"""What steps take of a GPU's memory: allocated, reserved, and the least with which they run."""
