"""LoRA: the weights of a model stay as they are, and two thin matrices are trained beside each layer.

python examples/lora.py
"""

import torch
from torch import Tensor, nn

import lockstep
from lockstep.data import load_dataset


class LoRA(nn.Module):
    """A linear layer that is frozen, and what is added to it."""

    def __init__(self, layer: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, X: Tensor) -> Tensor:
        return self.layer(X) + self.scale * (X @ self.down.T) @ self.up.T


def make_net() -> nn.Module:
    """Stands for a model that was trained before."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def with_lora(net: nn.Module) -> nn.Module:
    """The same model with thin matrices beside all linear layers."""
    torch.manual_seed(1)
    for name, part in list(net.named_modules()):
        if isinstance(part, nn.Linear):
            net.set_submodule(name, LoRA(part))
    return net


def main(num_epochs: int = 2) -> set[str]:
    mini = load_dataset("fashion-mnist-mini")
    data = (mini.X_train, mini.y_train), (mini.X_test, mini.y_test)
    net = with_lora(make_net())
    trained = sum(param.numel() for param in net.parameters() if param.requires_grad)
    print(f"{trained:,} of {sum(param.numel() for param in net.parameters()):,} parameters are trained")
    hashes = set()
    for devices in (1, 2, 3):
        how = {"optimizer": "adamw", "lr": 1e-2, "batch_size": 128, "epochs": num_epochs, "quiet": True}
        result = lockstep.train(model=net, data=data, devices=devices, **how)
        hashes.add(result.weights_sha256)
        print(f"{devices} devices: test accuracy {result.test_accuracy:.3f}, {result.weights_sha256[:12]}")
    return hashes


if __name__ == "__main__":
    main()
