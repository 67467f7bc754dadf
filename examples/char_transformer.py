"""A character-level transformer that learns a text file and continues it.

python examples/char_transformer.py README.md
"""

import sys
from pathlib import Path

import numpy as np
import torch

import lockstep
from lockstep.models.transformer import Transformer

LENGTH = 64  # characters of a sequence


def sequences(text: str, alphabet: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of the text, and the same sequences one character later."""
    tokens = np.array([alphabet.index(character) for character in text])
    starts = range(0, len(tokens) - LENGTH - 1, LENGTH // 8)
    X = np.stack([tokens[start : start + LENGTH] for start in starts])
    y = np.stack([tokens[start + 1 : start + LENGTH + 1] for start in starts])
    return X, y


def generate(module: torch.nn.Module, start: list[int], num_characters: int) -> list[int]:
    """The tokens of `start`, continued with the most likely characters."""
    module.eval()
    tokens = list(start)
    for _ in range(num_characters):
        scores = module(torch.tensor([tokens[-LENGTH:]]))
        tokens.append(int(scores[0, :, -1].argmax()))
    return tokens


def main(path: str, num_epochs: int = 10, width: int = 128) -> lockstep.Result:
    text = Path(path).read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    X, y = sequences(text, alphabet)
    cut = max(1, len(X) // 10)
    result = lockstep.train(
        model=lambda: Transformer(len(alphabet), LENGTH, width=width),
        data=((X[cut:], y[cut:]), (X[:cut], y[:cut])),
        optimizer="adamw",
        lr=3e-3,
        weight_decay=0.01,
        schedule="cosine",
        warmup=20,
        clip_norm=1.0,
        batch_size=min(32, len(X) - cut),
        epochs=num_epochs,
    )
    tokens = generate(result.module, X[0][:20].tolist(), 100)
    print("".join(alphabet[token] for token in tokens))
    return result


if __name__ == "__main__":
    main(sys.argv[1])
