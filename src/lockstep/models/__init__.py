"""Models by name."""

from lockstep.models.lenet import LENET
from lockstep.models.model import Forward, Model, cross_entropy_sum

__all__ = ["MODELS", "Forward", "Model", "cross_entropy_sum"]

MODELS = {"lenet": LENET}
