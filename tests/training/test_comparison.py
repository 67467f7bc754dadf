"""What a comparison says of runs: only like is compared with like, and nothing is claimed that was not learned."""

import pytest

from lockstep.config import RunConfig
from lockstep.report.events import EpochDone, Result
from lockstep.training.compared_rows import Row
from lockstep.training.comparison import Comparison
from lockstep.training.time_to_target import has_learned

SETTINGS = vars(RunConfig(data="fashion-mnist-mini", num_epochs=2, engine="inprocess"))


def result(k=1, sha="ab", accuracies=(0.5, 0.8), seconds=(2.0, 2.0), losses=(1.0, 0.9), steps=4, first_loss=2.3):
    history = [
        EpochDone(n, s, loss, acc) for n, (s, loss, acc) in enumerate(zip(seconds, losses, accuracies, strict=False), 1)
    ]
    mean = sum(done.seconds for done in history) / len(history)
    return Result(
        test_accuracy=history[-1].test_accuracy, seconds_per_epoch=mean, samples_per_second=2000 / mean,
        backend="torch", backend_version="2", devices=[f"cuda:{i}" for i in range(k)], steps=steps,
        first_loss=first_loss, weights_sha256=sha * 32, history=history, run=None, params={},
    )  # fmt: skip


def row(k=1, sha="ab", name="", about=None, **settings):
    return Row({**SETTINGS, **settings}, result(k, sha, **(about or {})), name)


OTHERS = [
    {"seed": 3},
    {"momentum": 0.9},
    {"model": "mlp"},
    {"data": "other.npz"},
    {"num_shards": 4},
    {"optimizer": "adam"},
    {"precision": "bf16"},
    {"made_with": {"version of the backend": "1"}},
    {"data_sha256": "cd"},
    {"about": {"steps": 8}},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_hashes_and_speed_are_compared_between_runs_with_the_same_settings_only(other):
    said = Comparison([row(1), row(2, sha="cd", **other)]).sentence()
    assert "please report it" not in said
    assert "the number of devices changed" not in said
    assert "times as many samples a second" not in said
    assert "weights and speed are compared between runs with the same settings only" in said


def test_runs_that_must_be_equal_and_are_not_are_reported():
    assert "which must not happen: please report it" in Comparison([row(1), row(2, sha="cd")]).sentence()
    assert "which must not happen" in Comparison([row(1), row(1, sha="cd", engine="processes")]).sentence()
    exchanges = Comparison([row(1, exchange="tree"), row(2, sha="cd", exchange="gather")])
    assert "which must not happen" in exchanges.sentence(), "these keep the order of the tree"


def test_what_was_given_in_python_may_be_another_thing_of_the_same_name():
    rows = [row(k, sha, f"run{k}", model="Net given in Python") for k, sha in ((1, "ab"), (2, "cd"))]
    assert "what was given in Python may not be the same" in Comparison(rows).sentence()
    of_a_sweep = [each._replace(name="") for each in rows]
    assert "please report it" in Comparison(of_a_sweep).sentence()


def test_a_column_for_every_setting_that_differs_and_for_the_names_of_runs():
    found = Comparison([row(1, name="one", seed=0), row(2, sha="cd", name="two", seed=3, model="mlp", num_epochs=3)])
    head, first, second = found.table()
    assert head[:7] == ("run", "k", "batch", "lr", "model", "seed", "epochs")
    assert first[:7] == ("one", "1", "256", "0.2", "lenet", "0", "2")
    assert second[:7] == ("two", "2", "256", "0.2", "mlp", "3", "3")
    assert [each["seed"] for each in found.plain()] == [0, 3]
    texts = [text.get_text() for text in found.plot().axes[0].get_legend().get_texts()]
    assert any("one" in text for text in texts)
    assert any("two" in text for text in texts)


def test_accuracies_on_different_data_are_not_compared():
    found = Comparison([row(1), row(1, data="other.npz")])
    assert "different data" in found.sentence()
    assert not found.target
    assert "best" not in found.sentence()


# --- speed


def test_the_speed_is_that_of_the_epochs_after_the_first():
    """The first run of a process carries its warm-up: the order of the runs must not change what is said."""
    warm, steady = {"seconds": (9.0, 2.0)}, {"seconds": (1.0, 1.0)}
    for rows in ([row(1, about=warm), row(2, about=steady)], [row(2, about=steady), row(1, about=warm)]):
        said = Comparison(rows).sentence()
        assert "2 devices train 2.00 times as many samples a second as 1, a scaling efficiency of 100%" in said
    head, first, _ = Comparison([row(1, about=warm), row(2, about=steady)]).table()
    assert first[head.index("samples/s")] == "1,000"


def test_of_one_epoch_no_speed_up_is_stated_and_the_reason_is_given():
    one = {"seconds": (9.0,), "accuracies": (0.8,)}
    said = Comparison([row(1, about=one), row(2, about=one)]).sentence()
    assert "times as many samples a second" not in said
    assert "no speed-up is stated, as one epoch includes the warm-up: train at least 2 epochs" in said
    assert "was reached first" not in said


def test_the_warm_up_is_no_part_of_the_time_to_a_target():
    found = Comparison([row(1, about={"seconds": (9.0, 2.0)}), row(2, about={"seconds": (2.0, 2.0)})], wanted=0.8)
    assert [found.reached(each).seconds for each in found.rows] == [4.0, 4.0]


# --- what was learned

CHANCE = {"accuracies": (0.1, 0.1), "losses": (2.35, 2.306)}


def test_where_nothing_was_learned_there_is_no_best_and_no_target():
    found = Comparison([row(1, sha=sha, learning_rate=lr, about=CHANCE) for sha, lr in (("ab", 0.1), ("cd", 0.2))])
    said = found.sentence()
    assert "o run has learned anything yet" in said
    assert "train longer" in said
    assert "best" not in said
    assert "accuracy 0.095" not in said
    assert not any("to 0.0" in title for title in found.table()[0])
    assert found.plain()[0]["target"] is None
    assert len(found.plot().axes) == 1, "no time to a target"


def test_a_target_that_was_asked_for_stays():
    found = Comparison([row(1, about=CHANCE)], wanted=0.8)
    assert found.plain()[0]["target"] == 0.8
    assert "not reached" in found.table()[1]


@pytest.mark.parametrize(
    ("accuracy", "losses", "first_loss", "learned"),
    [
        (0.1, (2.5, 2.31), 2.6, False),  # ten classes
        (0.1, (float("nan"),), 2.4, False),
        (0.104, (8.0, 5.0), 2.35, False),  # diverges
        (0.35, (2.2, 1.9), 2.4, True),
        (0.5, (0.70, 0.694), 0.72, False),  # two classes
        (0.7, (0.66, 0.61), 0.7, True),
        (0.97, (0.12, 0.1), 0.7, True),
        (1.0, (0.01, 0.0001), 2.3, True),
        (0.01, (4.7, 4.61), 4.8, False),  # a hundred classes
        (0.05, (4.4, 4.2), 4.7, True),
        (None, (1.0, 0.5), 1.2, True),  # a regression
        (None, (1.2, 1.2), 1.2, False),
        (None, (-1.0, -2.0), -0.5, True),  # a likelihood
        (None, (-0.5, -0.5), -0.5, False),
    ],
)
def test_better_than_a_guess(accuracy, losses, first_loss, learned):
    about = {"accuracies": [accuracy] * len(losses), "losses": losses, "first_loss": first_loss}
    assert has_learned(result(**about)) is learned


def test_ties_are_named_as_ties_and_sentence_and_picture_have_the_same_best():
    def run(batch, lr, accuracies):
        return row(1, sha=f"{batch}{lr}"[:2], batch_size=batch, learning_rate=lr, about={"accuracies": accuracies})

    found = Comparison(
        [run(16, 0.1, (0.3, 0.8)), run(16, 0.2, (0.79, 0.7)), run(32, 0.1, (0.3, 0.6)), run(32, 0.2, (0.3, 0.6))]
    )
    found.wanted = 0.6
    said = found.sentence()
    assert "he best learning rate is 0.1 for batch 16, 0.1 and 0.2 (equally good) for batch 32" in said
    bars = [text.get_text() for text in found.plot().axes[1].texts]
    assert [bar.partition(":")[0] for bar in bars] == ["batch 16, lr 0.1", "batch 32, lr 0.1 and lr 0.2"]
    assert "the best test accuracy is 0.8000 (batch 16, lr 0.1)" in said
    same = Comparison([row(1), row(2)])
    assert "all runs end with the test accuracy 0.8000" in same.sentence()


# --- the picture


def test_one_epoch_is_an_axis_from_0_to_1_and_the_picture_says_what_it_is_of():
    one = {"seconds": (9.0,), "accuracies": (0.8,)}
    figure = Comparison([row(1, about=one), row(2, about=one)]).plot()
    left, right = figure.axes
    assert left.get_xlim() == (0, 1)
    assert figure.get_suptitle() == "lenet on fashion-mnist-mini"
    assert figure.get_supxlabel() == "batch 256; 8 shards; sgd; lr 0.2; seed 0; 1 epoch; torch 2"
    assert "learning rate" not in right.get_title(loc="left"), "there is only one"


def test_many_devices_are_not_listed_one_by_one():
    assert "16 devices (cuda:0 ... cuda:15)" in str(Comparison([row(16)]))


def test_settings_of_any_kind_in_a_recorded_run_do_not_matter():
    deep = []
    for _ in range(5000):
        deep = [deep]
    odd = Row({"made_with": deep, "data_sha256": deep, "batch_size": None}, result(0, seconds=(1.0, 0.0)))
    for rows in ([odd], [odd, row(2)], [odd, odd]):
        assert Comparison(rows).sentence().endswith(".")
        assert Comparison(rows).plain()
        assert Comparison(rows).plot()
