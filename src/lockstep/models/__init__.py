"""Models by name."""

from lockstep.models.lenet_cropped import LENET
from lockstep.models.model import BuiltIn, CrossEntropySum, Forward, Model

__all__ = ["MODELS", "BuiltIn", "CrossEntropySum", "Forward", "Model"]

# `--model` takes package.file:function of your own too.
MODELS: dict[str, Model | BuiltIn] = {
    "lenet": LENET,
    "lenet-bn": BuiltIn("lockstep.models.lenet_bn:lenet_bn"),
    "mlp": BuiltIn("lockstep.models.mlp:mlp"),
    "resnet18": BuiltIn("lockstep.models.resnet18:resnet18"),
    "transformer": BuiltIn("lockstep.models.transformer:transformer"),
}
