"""What a compiled program says of itself."""

from typing import Any

import jax

GRAPHS_OPTION = "xla_gpu_enable_command_buffer"
"""Option of one compilation: what CUDA graphs may hold."""
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"
"""What they hold by default, so far as these programs have it."""


def planned_bytes(compiled: jax.stages.Compiled) -> int:
    """Memory of a device that XLA planned for, what is donated counted once."""
    memory: Any = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return total + memory.output_size_in_bytes - memory.alias_size_in_bytes


def first_line(error: Exception, length: int = 80) -> str:
    """The beginning of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:length]
