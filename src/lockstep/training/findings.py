"""What the runs of a comparison show, as sentences: same weights, speed-up, the best settings."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lockstep.backends.hardware import cpu
from lockstep.config import field_of, settings_in
from lockstep.core.entry_points import GIVEN
from lockstep.core.settings import IDENTITY, option_of
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.compared_rows import Labels, Row, grouped, listed
from lockstep.training.time_to_target import Target, final_value, has_learned, reached

LEARNED_NOTHING = (
    "no run has learned anything yet, all end no better than a guess: train longer (--epochs), or with other settings"
)
ONE_EPOCH = "no speed-up is stated, as one epoch includes the warm-up: train at least 2 epochs"


class Findings(NamedTuple):
    """The runs, what they are called, and what they are judged by."""

    rows: list[Row]
    labels: Labels
    target: Target

    def sentence(self) -> str:
        """What the runs show, in one sentence."""
        found = self.same_weights() + self.speed_up() + self.shared_cores() + self.quality()
        text = "; ".join(found) or "the runs have no accuracy or loss to compare them by"
        return text[0].upper() + text[1:] + "."

    def same_weights(self) -> list[str]:
        """Whether runs that differ in what must not change the weights have the same."""
        groups = [group for group in grouped(self.rows, lambda row: row.same_weights).values() if len(group) > 1]
        for group in groups:
            if len({row.result.weights_sha256 for row in group}) > 1:
                return [_why_weights_differ(group)]
        counts = sorted({row.num_devices for group in groups for row in group})
        if len(counts) == 1:
            return ["runs with the same settings end with the same weights, bit for bit"]
        if counts:
            return [f"with the same settings, {listed(counts)} devices end with the same weights, bit for bit"]
        return self._not_the_same_run()

    def _not_the_same_run(self) -> list[str]:
        """Why weights and speed of different numbers of devices are not compared."""
        if len({row.num_devices for row in self.rows}) < 2:
            return []
        identity = {each.name for each in settings_in(IDENTITY)} | {"num_epochs"}
        names = [option_of(field_of(name)).replace("_", " ") for name in self.labels.varying if name in identity]
        what = listed(names) if names else "data, versions or number of steps"
        return [f"the runs differ in {what}: weights and speed are compared between runs with the same settings only"]

    def speed_up(self) -> list[str]:
        """The throughput of the largest number of devices against the smallest, of runs with the same settings."""
        ratios: dict[tuple[int, int], list[float]] = {}
        has_one_epoch = False
        for group in grouped(self.rows, lambda row: row.same_speed).values():
            by_count = grouped(group, lambda row: row.num_devices)
            few, many = min(by_count), max(by_count)
            if few == many:
                continue
            speeds = [[row.steady_speed for row in by_count[k]] for k in (few, many)]
            slow, fast = ([each.samples_per_second for each in of_k if each] for of_k in speeds)
            if slow and fast and median(slow) > 0:
                ratios.setdefault((few, many), []).append(median(fast) / median(slow))
            else:
                has_one_epoch = True
        if has_one_epoch and not ratios:
            return [ONE_EPOCH]
        return [
            f"{many} devices train {median(found):.2f} times as many samples a second as {few}, a scaling efficiency "
            f"of {100 * median(found) * few / many:.0f}%"
            for (few, many), found in ratios.items()
        ]

    def shared_cores(self) -> list[str]:
        """Logical CPU devices that share cores bring no speed."""
        most = max((row for row in self.rows), key=lambda row: row.num_devices)
        num_cores = cpu().num_cores
        if most.num_devices <= num_cores or not most.result.devices[0].startswith("cpu"):
            return []
        shares = f"{most.num_devices} logical CPU devices share {num_cores} cores"
        return [f"{shares}: more than {num_cores} bring no speed"]

    def quality(self) -> list[str]:
        """Which settings were the best, and which were good first."""
        if not is_same_task(self.rows):
            return ["the runs were trained on different data or losses: how good they are is not compared"]
        if not self.target:
            return [LEARNED_NOTHING]
        return self.best_rates() + self.first_at_target() + self.best()

    def best_rates(self) -> list[str]:
        """The best learning rate for each batch size and other setting, where there are several of both."""
        groups = grouped(self.rows, lambda row: self.labels.of(row, "run", "learning_rate", "num_devices"))
        if len(groups) < 2 or any(len({row.learning_rate for row in group}) < 2 for group in groups.values()):
            return []
        parts = []
        for name, group in groups.items():
            best = best_rows([row for row in group if has_learned(row.result)], self.target.is_accuracy)
            rates = sorted({row.learning_rate or 0.0 for row in best})
            which = listed(rates) if rates else "none so far"
            parts.append(f"{which}{' (equally good)' if len(rates) > 1 else ''} for {name}")
        return [f"the best learning rate is {', '.join(parts)}"]

    def first_at_target(self) -> list[str]:
        """Who was good first, and who needed the fewest samples: larger batches are faster, and learn less from one."""
        times = [(good, row) for row in self.rows if (good := reached(row.result, self.target)) is not None]
        if len(self.rows) < 2 or not times:
            return []
        fewest = min(good.num_samples for good, _ in times)
        of_fewest = [row for good, row in times if good.num_samples == fewest]
        if any(row.steady_speed is None for _, row in times):  # one epoch: its seconds are those of the warm-up
            if len(of_fewest) == len(self.rows):
                return []
            who = self.labels.in_a_sentence(*of_fewest)
            return [f"{self.target} was reached with the fewest samples by {who}: {fewest:,}"]
        fast, of_fast = min(times, key=lambda each: each[0].seconds)
        few, of_few = min(times, key=lambda each: each[0].num_samples)
        said = (
            f"{self.target} was reached first by {self.labels.in_a_sentence(of_fast)}: {fast.num_samples:,} samples, "
        )
        said += f"{fast.seconds:.2f} s"
        if few.num_samples < fast.num_samples:
            said += f" ({self.labels.in_a_sentence(of_few)} needed {few.num_samples:,} samples and {few.seconds:.2f} s)"
        return [said]

    def best(self) -> list[str]:
        """The best runs; all that are equally good."""
        is_accuracy = self.target.is_accuracy
        best = best_rows(self.rows, is_accuracy)
        if not best:
            return []
        value = f"{final_value(best[0].result, is_accuracy):.4f}"
        what = "test accuracy" if is_accuracy else "training loss"
        if len(best) == len(self.rows) > 1:
            return [f"all runs end with the {what} {value}"]
        return [f"the {'best' if is_accuracy else 'lowest'} {what} is {value} ({self.labels.in_a_sentence(*best)})"]


def best_rows(rows: Sequence[Row], is_accuracy: bool) -> list[Row]:
    """The runs that end with the highest accuracy, or the lowest loss: all of them, where several are equal."""
    values = [final_value(row.result, is_accuracy) for row in rows]
    finite = [value for value in values if value == value]
    if not finite:
        return []
    best = max(finite) if is_accuracy else min(finite)
    return [row for row, value in zip(rows, values, strict=True) if value == best]


def is_same_task(rows: Sequence[Row]) -> bool:
    """Whether accuracies, or losses, of the runs mean the same."""
    return len({row.data for row in rows}) == 1 and len({repr(row.settings.get("loss")) for row in rows}) == 1


def _why_weights_differ(group: Sequence[Row]) -> str:
    """Runs that should have the same weights do not: what is to blame."""
    values = [row.settings.get(each.name) for row in group for each in settings_in(IDENTITY)]
    by_count = grouped(group, lambda row: row.num_devices)
    what = "the number of devices changed" if len(by_count) > 1 else "runs with the same settings differ in"
    exchange = group[0].settings.get("exchange")
    if exchange not in KEEPS_THE_TREE:
        why = f"because {exchange} adds in an order of its own"
    elif any(row.result.notes for row in group):
        why = "because a run was resumed where bits may differ (see its notes)"
    elif group[0].name and any(isinstance(value, str) and value.endswith(GIVEN) for value in values):
        return (
            f"the weights of runs on batch {group[0].batch_size} differ: what was given in Python may not be the same"
        )
    else:
        why = "which must not happen: please report it"
    return f"with batch {group[0].batch_size} {what} the weights, {why}"
