"""Models by name."""

from lockstep.models.lenet import LENET
from lockstep.models.model import CrossEntropySum, Forward, Model

__all__ = ["MODELS", "CrossEntropySum", "Forward", "Model"]

# A model for every framework, or the place of a module; `--model` takes places of your own too.
MODELS: dict[str, Model | str] = {
    "lenet": LENET,
    "lenet-bn": "lockstep.modules.lenet_bn:lenet_bn",
    "mlp": "lockstep.modules.mlp:mlp",
    "resnet18": "lockstep.modules.resnet18:resnet18",
    "transformer": "lockstep.modules.transformer:transformer",
}
