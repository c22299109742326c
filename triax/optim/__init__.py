"""How weights move: orthogonalised momentum for matrices, AdamW for the rest, bounded logits, the schedule."""

from triax.optim.build import Moved, Optimizer, build
from triax.optim.groups import Role, dump, roles
from triax.optim.schedule import branch, rate

__all__ = ["Moved", "Optimizer", "Role", "branch", "build", "dump", "rate", "roles"]
