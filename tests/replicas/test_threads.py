"""One intra-op thread on every rank, from its first operation on, whatever else the process does."""

import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Loaded(Dataset):
    """Samples that are loaded one by one, by the main thread or by worker processes."""

    def __init__(self):
        self.X, self.y = torch.rand(24, 6), torch.arange(24) % 3

    def __len__(self):
        return len(self.X)

    def __getitem__(self, number):
        torch.set_num_threads(2)  # a rank must not inherit this, even before its first operation
        return self.X[number], self.y[number]


seen = set()


class Counts(nn.Module):
    """Records how many intra-op threads an operation may use."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, X):
        seen.add(torch.get_num_threads())
        return self.out(X)


def test_loaded_samples_do_not_change_the_number_of_threads_of_a_rank():
    seen.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for workers in (0, 1):
            lockstep.train(
                model=Counts,
                data=Loaded(),
                devices=2,
                batch_size=8,
                shards=4,
                epochs=2,
                workers=workers,
                lr=0.1,
                quiet=True,
            )
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


COLLECTS = """
import gc, threading, time, torch
from lockstep.replicas.keyed_random import rng_state

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.002)  # lets other threads run

def work():
    for _ in range(50):
        Garbage()
        rng_state(torch.device("cpu"))

gc.set_threshold(1)
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


def test_a_garbage_collection_may_come_while_a_rank_looks_at_the_random_numbers():
    # not in this process: in a deadlock no thread would ever run again
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
