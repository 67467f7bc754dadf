"""Failures in rare moments: between an update and its count, and before the first line of a run."""

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


def test_a_run_that_failed_before_it_started_can_be_resumed(lockstep, few, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"event": "stopped", "reason": "no worker is left"}\n')
    done = lockstep("train", "--data", few, "--batch-size", 8, "--epochs", 1, "--out", folder, "--resume")
    assert done.status == 0, done.err
    (folder / "config.json").unlink()  # now there is more in it than such a run leaves
    refused = lockstep("train", "--data", few, "--out", folder, "--resume")
    assert refused.status == 2
    assert "is not a run" in refused.err
