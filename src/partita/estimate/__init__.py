"""What a plan costs, computed from the residence table before anything runs: bytes held, bytes sent."""
