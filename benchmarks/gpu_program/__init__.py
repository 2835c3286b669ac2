"""The program that GPUs would run, compiled without one: its memory, its traffic, and a projected step."""
