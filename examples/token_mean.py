"""A language model with padding: the loss is the mean over the tokens of the batch, and not a mean of means.

python examples/token_mean.py
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import lockstep
from lockstep.models.attention import Size
from lockstep.models.gpt2 import GPT2

PAD = -100  # the label of a position that does not count


def token_mean(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight): the sum over all tokens of the batch is divided by their number, once."""
    losses = F.cross_entropy(scores, labels, ignore_index=PAD, reduction="sum")
    return losses, (labels != PAD).sum()


def sentences(num_samples: int = 256, length: int = 32) -> tuple[Tensor, Tensor]:
    """Counting upwards, from any number on; of different lengths, padded."""
    draw = torch.Generator().manual_seed(0)
    tokens = (torch.randint(50, (num_samples, 1), generator=draw) + torch.arange(length + 1)) % 50
    X, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    y[torch.arange(length) >= torch.randint(4, length, (num_samples, 1), generator=draw)] = PAD
    return X, y


def main(num_epochs: int = 3) -> set[str]:
    X, y = sentences()
    hashes = set()
    for devices in (1, 2, 3):
        result = lockstep.train(
            model=lambda: GPT2(num_tokens=64, length=32, size=Size(width=32, num_heads=2, num_blocks=2)),
            data=(X.numpy(), y.numpy()),
            loss=token_mean,
            optimizer="adamw",
            lr=1e-3,
            batch_size=32,
            epochs=num_epochs,
            devices=devices,
            quiet=True,
        )
        print(f"{devices} devices: loss {result.history[0].train_loss:.3f} -> {result.history[-1].train_loss:.3f}")
        hashes.add(result.weights_sha256)
    return hashes


if __name__ == "__main__":
    main()
