"""A plain run of ours beside a peer's, on one card, with the same data, batch and number of steps."""
