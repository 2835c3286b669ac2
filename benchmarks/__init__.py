"""Measurements: run each file as a module, `python -m benchmarks.<name>`."""
