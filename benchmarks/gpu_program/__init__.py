"""The program that GPUs would run, compiled without one.

Its memory, its traffic, and a projected step.
"""
