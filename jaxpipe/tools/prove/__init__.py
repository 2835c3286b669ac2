"""`prove`: a proof that a pipeline computes what its layers compute one after another."""

# For users.
from ._peer import prove_peer
from ._proof import Claim, Finding, Proof
from ._prove import prove

# isort: split
# For other rooms.
from ._cli import main
from ._schedule import SymbolicRun, require_in_flight

__all__ = [
    "Claim",
    "Finding",
    "Proof",
    "prove",
    "prove_peer",
]
