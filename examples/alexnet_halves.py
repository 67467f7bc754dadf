"""AlexNet as in 2012: two devices, each with half of the channels of every layer; a small one, for small images.

python examples/alexnet_halves.py

Then it was a way to fit a network into two small GPUs, and it changed the network: some layers saw only the channels of
their own GPU. Here every layer sees all channels, and the halves are a matter of who computes what.
"""

from itertools import pairwise

from torch import nn

import lockstep


class SmallAlexNet(nn.Module):
    """Five convolutions and three linear layers, as AlexNet has them, for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        channels = [1, 12, 32, 48, 48, 32]
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(pairwise(channels)):
            layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
            if number in (0, 1, 4):
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classify = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(32 * 3 * 3, 128), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, X):
        return self.classify(self.features(X))


def main(num_epochs: int = 3) -> set[str]:
    hashes = set()
    for way, split in {"one device": "data=1", "two halves": "layers=2"}.items():
        result = lockstep.train(
            model=SmallAlexNet, data="fashion-mnist-mini", optimizer="adam", lr=2e-3, batch_size=100, shards=4,
            epochs=num_epochs, split=split, slices=2, quiet=True,
        )  # fmt: skip
        kilobytes = " and ".join(str(sum(device.values()) // 1000) for device in result.device_memory)
        print(f"{way}: {kilobytes} kB a device, test accuracy {result.test_accuracy:.3f}")
        hashes.add(result.weights_sha256)
    print(f"weights sha256 of both: {' and '.join(hashes)}")
    return hashes


if __name__ == "__main__":
    main()
