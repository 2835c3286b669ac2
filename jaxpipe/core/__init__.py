"""The pipeline: from layers, an optimiser and a mesh to a state and one compiled step.

`pipeline` asks `planner` for every open decision, `state` for the storage of parameters, and
`executor` for what one device runs.
"""
