"""A language model of Hugging Face with its own loss: a mean over the tokens of the whole batch, padding left out.

pip install transformers
python examples/gpt2_finetune.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep

SENTENCES = "the quick brown fox jumps over the lazy dog . a fox is quick ; a dog is lazy . who jumps ? the fox jumps ."
TEXT = SENTENCES.split()
WORDS = {word: number for number, word in enumerate(sorted(set(TEXT)), 1)}  # 0 is for padding
IGNORED = -100


class Sentences(torch.utils.data.Dataset):
    """Pieces of the text, of different lengths: samples are dicts, as those of `datasets` are."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        start, length = number % len(TEXT), 4 + number % 7
        return {"input_ids": [WORDS[word] for word in (TEXT + TEXT)[start : start + length]]}


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """The samples of a shard, made as long as the longest of them."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = pad(rows, batch_first=True), pad(rows, batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "attention_mask": (labels != IGNORED).long(), "labels": labels}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS) + 1, bos_token_id=0, eos_token_id=0, **size))


def main(num_epochs: int = 5) -> set[str]:
    hashes = set()
    for devices in (1, 2, 3):
        result = lockstep.train(
            model=make_model(), data=Sentences(), loss="model", collate_fn=padded, optimizer="adamw", lr=3e-3,
            batch_size=16, epochs=num_epochs, devices=devices, workers=0, quiet=True,
        )  # fmt: skip
        hashes.add(result.weights_sha256)
        losses = f"{result.history[0].train_loss:.3f} -> {result.history[-1].train_loss:.3f}"
        print(f"{devices} devices: loss of a token {losses}, weights {result.weights_sha256[:12]}")
    return hashes


if __name__ == "__main__":
    main()
