"""A vision transformer (of timm, where it is installed) with mixup: images are blended in pairs, and so are labels.

python examples/vit_mixup.py
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.data import load_dataset


def make_vit() -> nn.Module:
    torch.manual_seed(0)
    try:
        import timm
    except Exception:  # not installed, or it does not fit this PyTorch
        from lockstep.models.attention import Size
        from lockstep.models.vit import ViT

        return ViT((1, 28, 28), num_classes=10, patch=7, size=Size(width=32, num_heads=2, num_blocks=2))
    how = {"img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", embed_dim=32, depth=2, num_heads=2, **how)


class Images(torch.utils.data.Dataset):
    """Images with their labels as shares of classes."""

    def __init__(self, num_samples: int) -> None:
        mini = load_dataset("fashion-mnist-mini")
        self.X = torch.from_numpy(mini.X_train[:num_samples]).float() / 255
        self.y = F.one_hot(torch.from_numpy(mini.y_train[:num_samples]), 10).float()

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Blended with another image. What is drawn is keyed by (seed, epoch, sample): the same on any devices."""
        share, other = np.random.beta(0.8, 0.8), np.random.randint(len(self))
        return tuple(share * part[number] + (1 - share) * part[other] for part in (self.X, self.y))


def main(num_epochs: int = 2, num_samples: int = 1000) -> set[str]:
    data, hashes = Images(num_samples), set()
    for devices in (1, 2, 3):
        how = {"optimizer": "adamw", "lr": 1e-3, "batch_size": 100, "epochs": num_epochs, "workers": 0, "quiet": True}
        result = lockstep.train(model=make_vit(), data=data, devices=devices, **how)
        hashes.add(result.weights_sha256)
        print(f"{devices} devices: loss {result.history[-1].train_loss:.3f}, weights {result.weights_sha256[:12]}")
    return hashes


if __name__ == "__main__":
    main()
