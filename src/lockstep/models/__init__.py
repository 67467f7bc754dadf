"""Models by name."""

from lockstep.models.lenet_cropped import LENET
from lockstep.models.model import BuiltIn, CrossEntropySum, Forward, Model

__all__ = ["MODELS", "BuiltIn", "CrossEntropySum", "Forward", "Model"]

# `--model` takes package.module:function of your own too.
MODELS: dict[str, Model | BuiltIn] = {
    "lenet": LENET,
    "lenet-bn": BuiltIn("lockstep.models.lenet_bn:lenet_bn"),
    "mlp": BuiltIn("lockstep.models.mlp:mlp"),
    "resnet18": BuiltIn("lockstep.models.resnet18:resnet18"),
    "resnet50": BuiltIn("lockstep.models.resnet50:resnet50"),
    "vit-b-16": BuiltIn("lockstep.models.vit:vit_b_16"),
    "transformer": BuiltIn("lockstep.models.transformer:transformer"),
    "gpt2": BuiltIn("lockstep.models.gpt2:gpt2"),
    "bert": BuiltIn("lockstep.models.bert:bert"),
}
