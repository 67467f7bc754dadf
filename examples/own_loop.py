"""Your own loop: a step at a time, early stopping, a checkpoint to continue from on any devices.

python examples/own_loop.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import load_dataset


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def loaders() -> tuple[DataLoader, DataLoader]:
    mini = load_dataset("fashion-mnist-mini")
    train = TensorDataset(torch.from_numpy(mini.X_train).float() / 255, torch.from_numpy(mini.y_train))
    test = TensorDataset(torch.from_numpy(mini.X_test).float() / 255, torch.from_numpy(mini.y_test))
    shuffled = torch.Generator().manual_seed(0)  # the order of samples is your loop's own
    return DataLoader(train, 128, shuffle=True, generator=shuffled), DataLoader(test, 500)


def main(devices: int = 2, max_epochs: int = 20, patience: int = 2) -> str:
    train, test = loaders()
    best, since = float("inf"), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "best"
        with lockstep.Trainer(make_net(), optimizer="adam", lr=3e-3, devices=devices) as trainer:
            for epoch in range(1, max_epochs + 1):
                for batch in train:
                    out = trainer.step(batch)
                found = trainer.evaluate(test)
                print(f"epoch {epoch}: loss {out.loss:.4f}, test loss {found['loss']:.4f}, acc {found['accuracy']:.3f}")
                since = 0 if found["loss"] < best else since + 1
                if found["loss"] < best:
                    best = found["loss"]
                    trainer.save(path)
                if since == patience:
                    break
        with lockstep.Trainer.load(path, model=make_net(), devices=1) as trainer:  # on other devices
            print(f"best after step {trainer.num_steps}: {trainer.evaluate(test)}")
            return trainer.weights_sha256


if __name__ == "__main__":
    main()
