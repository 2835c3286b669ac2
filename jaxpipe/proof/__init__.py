"""`prove`: a proof that a pipeline computes what its layers compute one after another."""

# For users.
from ._peer import prove_peer as prove_peer
from ._proof import Claim as Claim
from ._proof import Finding as Finding
from ._proof import Proof as Proof
from ._prove import prove as prove

# isort: split
# For other rooms.
from ._cli import main as main
from ._schedule import SymbolicRun as SymbolicRun
from ._schedule import require_in_flight as require_in_flight

__all__ = [
    # For users.
    "Claim",
    "Finding",
    "Proof",
    "prove",
    "prove_peer",
    # For other rooms.
    "SymbolicRun",
    "main",
    "require_in_flight",
]
