"""ResNet-18 on Fashion-MNIST, as it is commonly trained: SGD with momentum, warm-up and a cosine, random flips.

python examples/resnet18_cosine.py --epochs 10                      # all GPUs, else a logical device for each core
python examples/resnet18_cosine.py --data fashion-mnist-mini --epochs 1 --width 8        # a short run without a GPU
"""

import argparse

import torch
from torch.utils.data import Dataset

import lockstep
from lockstep.data import load_dataset
from lockstep.models.resnet18 import ResNet18


class Flipped(Dataset):
    """Half of the images are flipped: which ones depends on (seed, epoch, sample), not on who loads them."""

    def __init__(self, X, y):
        self.X, self.y = torch.from_numpy(X).float() / 255, torch.from_numpy(y)

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        image = self.X[i]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self.y[i]


def main(arguments: list[str] | None = None) -> lockstep.Result:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", default=None, help="a number, or a list like cuda:0,cuda:1")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    options = parser.parse_args(arguments)
    data = load_dataset(options.data)
    return lockstep.train(
        model=lambda: ResNet18(in_channels=1, num_classes=10, width=options.width),
        data=(Flipped(data.X_train, data.y_train), ((data.X_test / 255).astype("float32"), data.y_test)),
        optimizer="sgd",
        lr=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        schedule="cosine",
        warmup=20,
        batch_size=options.batch_size,
        epochs=options.epochs,
        devices=options.devices,
    )


if __name__ == "__main__":
    main()
