"""The first minutes on one GPU."""
