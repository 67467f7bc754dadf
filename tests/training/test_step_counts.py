"""A step is counted as soon as the weights are those after it, whatever fails then."""

from lockstep.core.errors import PeerFailure
from lockstep.training import loop
from lockstep.training.loop import Training


def test_a_rank_that_loses_the_others_after_an_update_offers_the_weights_of_that_step(lockstep, few, monkeypatch):
    seen = []

    class LosesTheOthers:
        def __init__(self, *args):
            self._num_calls = 0

        def stops(self):
            self._num_calls += 1
            if self._num_calls == 2:  # two updates have happened
                raise PeerFailure("gone")
            return False

    events = Training.events

    def watched(self):
        try:
            yield from events(self)
        except PeerFailure:
            seen.append(self.local_checkpoint().progress.step)
            raise

    monkeypatch.setattr(loop, "StopAgreement", LosesTheOthers)
    monkeypatch.setattr(Training, "events", watched)
    lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--devices", 1)
    assert seen == [2]
