"""Your own network on logical CPU devices: the same weights on one, two and three of them.

python examples/own_cnn.py
"""

from torch import nn

import lockstep
from lockstep.data import load_dataset


class Net(nn.Module):
    """Two convolutions with batch norm, dropout, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(0.25)
        self.classify = nn.Linear(32 * 7 * 7, 10)

    def forward(self, X):
        return self.classify(self.dropout(self.features(X)))


def main(num_epochs: int = 3) -> set[str]:
    mini = load_dataset("fashion-mnist-mini")  # 2,000 + 500 images; your own arrays or tensors go here
    data = (mini.X_train, mini.y_train), (mini.X_test, mini.y_test)
    hashes = set()
    for devices in ("cpu:0", "cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"):
        result = lockstep.train(
            model=Net,  # a function that makes the module: its weights depend on the seed
            data=data,
            optimizer="adam",
            lr=2e-3,
            batch_size=64,
            epochs=num_epochs,
            devices=devices,
            seed=0,
        )
        hashes.add(result.weights_sha256)
    print(f"{len(hashes)} hash for three numbers of devices")
    return hashes


if __name__ == "__main__":
    main()
