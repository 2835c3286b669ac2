"""Finds a function's smallest residuals, and builds its backward, whole or split in two."""

from ._policy import without_complex as without_complex
from ._residuals import Residuals as Residuals
from ._residuals import differentiable as differentiable
from ._residuals import replace_differentiable as replace_differentiable
from ._split import SplitBackward as SplitBackward
from ._split import split_backward as split_backward
