"""Names of what a run is made of, without what they mean: the help and a shell must not wait for a framework.

The tables that these names choose from are where the things are (`models`, `optim`, ...); tests compare them.
"""

MODELS = ("lenet", "lenet-bn", "mlp", "resnet18", "resnet50", "vit-b-16", "transformer", "gpt2", "bert")
DATASETS = {
    "fashion-mnist": "60,000 training and 10,000 test images of 10 kinds of clothing",
    "fashion-mnist-mini": "2,000 + 500 of them, shipped with Lockstep",
}
LOSSES = ("cross_entropy", "mse", "l1", "bce", "model")
OPTIMIZERS = ("sgd", "adam", "adamw")
LOGGERS = ("tensorboard",)
