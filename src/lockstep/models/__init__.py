"""Models by name."""

from lockstep.models.lenet import LENET
from lockstep.models.model import CrossEntropySum, Forward, Model

__all__ = ["MODELS", "CrossEntropySum", "Forward", "Model"]

MODELS = {"lenet": LENET}
