"""Finds a function's smallest residuals, and builds its backward, whole or split in two."""

from ._policy import without_complex
from ._residuals import Residuals, differentiable, replace_differentiable
from ._split import SplitBackward, split_backward
