"""The learning rate that loggers see is the one that each step was trained with."""

import pytest
import torch

import lockstep

LENET = {"data": "fashion-mnist-mini", "batch_size": 500, "epochs": 2, "quiet": True, "log_every": 1}


class Rates:
    """A logger that keeps learning rates."""

    def __init__(self):
        self.found = []

    def log_hyperparams(self, params):
        pass

    def log_metrics(self, metrics, step=None):
        if "train_loss" in metrics:
            self.found.append(metrics.get("learning_rate"))

    def finalize(self, status):
        pass


@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_of_a_schedule(model):
    rates = Rates()
    lockstep.train(1, **LENET, model=model, lr=0.4, warmup=2, schedule="linear", logger=rates)
    assert rates.found == pytest.approx([0.2, 0.4, *(0.4 * (1 - part / 6) for part in range(6))])


def test_of_an_optimizer_and_a_scheduler_of_ones_own(vectors):
    rates = Rates()
    lockstep.train(
        1,
        model=torch.nn.Linear(6, 3),
        data=vectors,
        batch_size=20,
        epochs=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
        logger=rates,
        log_every=1,
        quiet=True,
    )
    assert rates.found == pytest.approx([0.5, 0.5, 0.05, 0.05])
