"""Metrics that are no mean over samples: outputs are gathered in order, and the metric is computed once."""

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import LockstepError

DRAW = np.random.RandomState(0)
X, Y = DRAW.standard_normal((120, 6)).astype(np.float32), DRAW.randint(0, 3, 120)
TEST = DRAW.standard_normal((53, 6)).astype(np.float32), DRAW.randint(0, 3, 53)
HOW = {"data": ((X, Y), TEST), "batch_size": 32, "epochs": 2, "lr": 0.1, "quiet": True}
RUNS = [(1, "inprocess"), (2, "inprocess"), (3, "inprocess"), (2, "processes")]


def net():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def macro_f1(output, y):
    predicted = output.argmax(1)
    scores = []
    for label in range(3):
        hits = ((predicted == label) & (y == label)).sum()
        scores.append(2 * hits / ((predicted == label).sum() + (y == label).sum()))
    return torch.stack(scores).mean()


class F1:
    """In the manner of torchmetrics."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.seen = []

    def update(self, output, y):
        self.seen.append((output, y))

    def compute(self):
        return macro_f1(*map(torch.cat, zip(*self.seen, strict=True)))


@pytest.mark.parametrize("form", ["object", "function"])
def test_it_is_computed_once_from_all_outputs(form):
    metric = F1() if form == "object" else lockstep.WholeSetMetric(macro_f1)
    results = [
        lockstep.train(model=net(), metrics={"f1": metric, "accuracy": "accuracy"}, devices=k, engine=engine, **HOW)
        for k, engine in RUNS
    ]
    with torch.no_grad():
        expected = float(macro_f1(results[0].module(torch.from_numpy(TEST[0])), torch.from_numpy(TEST[1])))
    assert [result.metrics for result in results] == [results[0].metrics] * len(RUNS)
    assert results[0].metrics["f1"] == pytest.approx(expected, abs=1e-7)
    assert set(results[0].metrics) == {"loss", "accuracy", "f1"}
    assert not getattr(metric, "seen", []), "the object stays as it was"


def test_a_trainer_has_them_too():
    batches = [
        (torch.from_numpy(TEST[0][part]), torch.from_numpy(TEST[1][part])) for part in (slice(0, 20), slice(20, 53))
    ]
    values = []
    for k in (1, 2, 3):
        with lockstep.Trainer(net(), lr=0.1, devices=k, metrics=[F1()]) as trainer:
            trainer.step((torch.from_numpy(X), torch.from_numpy(Y)))
            values.append(trainer.evaluate(batches)["F1"])
            with torch.no_grad():
                expected = macro_f1(trainer.module(torch.from_numpy(TEST[0])), torch.from_numpy(TEST[1]))
    assert values == [pytest.approx(float(expected), abs=1e-7)] * 3


def test_one_that_gives_several_numbers_is_refused():
    with pytest.raises(LockstepError, match="The metric per_class gives 3 numbers"):
        lockstep.train(
            model=net(), metrics={"per_class": lockstep.WholeSetMetric(lambda output, y: torch.zeros(3))}, **HOW
        )


def test_those_of_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    how = {"task": "multiclass", "num_classes": 3}
    metrics = torchmetrics.MetricCollection([torchmetrics.AUROC(**how), torchmetrics.F1Score(average="macro", **how)])
    results = [lockstep.train(model=net(), metrics=metrics, devices=k, engine=engine, **HOW) for k, engine in RUNS]
    assert [result.metrics for result in results] == [results[0].metrics] * len(RUNS)
    scores = results[0].module(torch.from_numpy(TEST[0])).detach()
    expected = {name: float(value) for name, value in metrics(scores, torch.from_numpy(TEST[1])).items()}
    assert {name: results[0].metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
