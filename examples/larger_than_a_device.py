"""A network that is too large for one device trains on two: cut into stages, and with every layer cut into halves.

python examples/larger_than_a_device.py

Say that a device has room for 4 MB of parameters, gradients and optimizer state. Logical CPU devices share the memory
of the machine, so what would not fit is trained here, too, and has the same weights. On GPUs, limit their real memory:
torch.cuda.set_per_process_memory_fraction.
"""

from torch import nn

import lockstep

MAX_BYTES = 4_000_000
WAYS = {  # how a step is split -> the settings; layers are computed in eight slices, so all have the same weights
    "one device": {"devices": 1},
    "two, each with half of the data": {"split": "data=2"},
    "two, and a sharded update": {"split": "data=2", "update": "sharded"},
    "two stages of the network": {"split": "network=2"},
    "two halves of every layer": {"split": "layers=2"},
    "four: two stages, of two halves each": {"split": "network=2,layers=2"},
}


def network(width: int = 256) -> nn.Module:
    """Three hidden layers with dropout: 0.4 M parameters, and with AdamW four floats for each."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (784, width, width):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def main(num_epochs: int = 2) -> dict[str, bool]:
    """Whether each way fits."""
    fits, hashes = {}, set()
    print(f"A device has room for {MAX_BYTES / 1e6:.1f} MB of parameters, gradients and optimizer state.")
    for way, settings in WAYS.items():
        result = lockstep.train(
            model=network, data="fashion-mnist-mini", optimizer="adamw", slices=8, batch_size=500, shards=4,
            epochs=num_epochs, quiet=True, **settings,
        )  # fmt: skip
        used = [sum(device.values()) for device in result.device_memory]
        fits[way], hashes = max(used) <= MAX_BYTES, hashes | {result.weights_sha256}
        megabytes = ", ".join(f"{each / 1e6:.1f}" for each in used)
        print(f"{way}: {megabytes} MB a device, {'fits' if fits[way] else 'would not fit'}")
    assert len(hashes) == 1, "all have the same weights"
    print(f"All end with the weights {result.weights_sha256[:12]}..., test accuracy {result.test_accuracy:.3f}.")
    return fits


if __name__ == "__main__":
    main()
