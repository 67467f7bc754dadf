"""Measures what the instructions of a step cost on the devices at hand, with the replicas and the runtime of a run.

Every figure comes from real steps of small batches (`probe.py`), with shards of each size that is asked for, the
smallest and the largest first, as far as the time allows:

    one device             a shard's passes, additions, the update, what the host needs besides
    all devices            the same shards at the same time: how much ranks slow each other down; the link between them
    a device a layer       one shard through all of them: each layer by itself, what it hands on and keeps
    a device a stage       the same for the cut that is best for these layers
    layers in slices       on one device, and on two
    whole steps            on one GPU; on several devices, of each way of splitting: what the clock does not know
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from lockstep.analysis.curves import Curve, curve_of
from lockstep.analysis.loading import HostMemory, Loading, measure_loading, remembered
from lockstep.analysis.placement import best_starts
from lockstep.analysis.probe import opened_probe
from lockstep.analysis.profile import IN_MEMORY, LayerCost, Profile, Sliced, quickest
from lockstep.analysis.timing import Sampler, alone_seconds, interruptible_clock, rest_of, typical
from lockstep.analysis.unmeasurable import cannot_be_measured
from lockstep.analysis.whole_steps import Corrections, alone
from lockstep.backends import devices_for, load_backend
from lockstep.config import DEFAULT_SLICES, RunConfig
from lockstep.core.errors import ConfigError, Interrupted, LockstepError, first_line
from lockstep.data.batch import LoadingSource, loader_errors
from lockstep.schedules.instructions import ACTIVATIONS, Add, Backward, Forward, ForwardBackward, Update
from lockstep.training.setup import Prepared, prepare
from lockstep.training.split_checks import check_split
from lockstep.training.task import UserObjects, grid_of

if TYPE_CHECKING:
    from lockstep.analysis.process_costs import ProcessCosts

CORRECTION_SHARE = 0.4  # of the time, that whole steps are run for besides
MAX_PROBED_STAGES = 3  # cuts that are measured as such; deeper ones are put together from layers
Log = Callable[[str], None]


class Wanted(NamedTuple):
    """What a plan is about."""

    max_devices: int
    num_shards: tuple[int, ...]
    splits: tuple[str, ...] = ("data", "network", "layers")
    seconds: float = 40.0  # to measure for, about
    engine: str = "inprocess"  # of several devices


class Measurement:
    """The measurement of one model. What does not fit into the time is left out, the least important first."""

    def __init__(
        self, config: RunConfig, objects: UserObjects | None, wanted: Wanted, log: Log, clock: Callable[[], float]
    ) -> None:
        self._config, self._given, self._objects, self._wanted, self._log = single(config), config, objects, wanted, log
        self.at_hand = devices_for(load_backend(config.backend), config.devices)
        self._clock = clock
        self._sizes = sorted({-(-config.batch_size // number) for number in wanted.num_shards})
        self._sampler = Sampler(self._sizes, config.batch_size, wanted.seconds, clock)

    def profile(self) -> Profile:
        """All of it; twice where the time is enough, because others may use the machine for a while."""
        loading = self._loading()
        has_processes, is_gpu = self._wanted.engine == "processes", self.at_hand[0].kind == "cuda"
        costs = self._processes() if has_processes and is_gpu else None  # which cannot be forked once it was used
        began, found = time.monotonic(), replace(self._once(self._log), loading=loading)
        taken = time.monotonic() - began
        if has_processes and not is_gpu:
            costs = self._processes()
        if began + self._wanted.seconds - time.monotonic() >= taken:
            self._log("measuring once more")
            found = quickest(found, self._once(lambda text: None))
        return self._corrected(found) if costs is None else costs.applied_to(found)

    def _once(self, log: Log) -> Profile:
        log("measuring one device")
        found = self._one_device()
        if self.at_hand[0].kind == "cuda":
            log("measuring whole steps")
            steps = alone(self._config, self.at_hand[0], self._wanted.num_shards, self._prepare)
            found = replace(found, whole_steps=steps)
        for number in self._at_the_same_time():
            log(f"measuring {number} devices at the same time")
            found = self._together(found, number)
        if "network" in self._wanted.splits and self._wanted.max_devices > 1:
            log("measuring the layers of the network")
            found = self._optional(found, "network", self._network)
        if "layers" in self._wanted.splits and self._wanted.max_devices > 1:
            log("measuring layers in slices")
            found = self._optional(found, "layers", self._slices)
        return found

    # --- what is measured ---

    def _loading(self) -> Loading:
        """Of samples that are not in memory. Those that the rest is measured with are, from then on."""
        config = replace(self._config, devices=str(self.at_hand[0]))
        memory = HostMemory(load_backend(config.backend))
        alone = self._prepare(config).task
        with closing(alone.train_set(memory)) as source:
            if source.in_memory:
                return IN_MEMORY
            self._log("measuring how samples are loaded")
            own = self._prepare(replace(config, workers=self._given.workers)).task
            with closing(own.train_set(memory)) as workers, cannot_be_measured("The data"), loader_errors():
                asked = alone.order(0), self._sizes[0], self._wanted.seconds / 20
                found = measure_loading(cast(LoadingSource, source), cast(LoadingSource, workers), *asked)
        assert self._objects is not None
        self._objects = replace(self._objects, data=remembered(self._objects.data))
        return found

    def _processes(self) -> "ProcessCosts":
        """The same in worker processes, and what they send each other."""
        from lockstep.analysis.process_costs import ProcessMeasurement  # loads its framework

        devices = [str(device) for device in self.at_hand[: self._wanted.max_devices]]
        sizes = [size for size in self._sizes if size not in self._sampler.problems]
        seconds = 0.3 * self._wanted.seconds
        measurement = ProcessMeasurement(self._config, self._objects, sizes, seconds, self._log)
        found = measurement.costs(devices)
        if "layers" in self._wanted.splits and len(devices) > 1:
            found = measurement.with_slices(found, devices[:2])
        return found

    def _one_device(self) -> Profile:
        config = replace(self._config, devices=str(self.at_hand[0]))
        given = self._given
        self._prepare(replace(config, engine=given.engine, exchange=given.exchange, update=given.update))  # may refuse
        prepared = self._prepare(config)
        with cannot_be_measured(), opened_probe(config, prepared) as probe:
            own = -(-config.batch_size // config.num_shards)
            steps = self._sampler.by_size(probe, 0.35, own=own if own in self._sizes else 0)
            kept = probe.kept_bytes(min(steps))
            held = probe.replicas[0].num_bytes()
            entries = len(probe.replicas[0].entries)
        smallest = steps[min(steps)]
        update, adds = typical(smallest, Update), typical(smallest, Add)
        return Profile(
            device=str(self.at_hand[0]),
            num_at_hand=len(self.at_hand),
            batch_size=config.batch_size,
            num_entries=entries,
            whole=curve_of((size, typical(found, ForwardBackward)) for size, found in steps.items()),
            add=adds / max(1, entries),
            update=update / max(1, entries),
            step=curve_of([(1, rest_of(smallest))]),
            kept_bytes=kept,
            parameter_bytes=held["parameters"],
            optimizer_bytes=held["optimizer"],
            left_out=dict(self._sampler.problems),
        )

    def _together(self, profile: Profile, number: int) -> Profile:
        """The same shards on so many devices at the same time."""
        config = replace(self._config, devices=",".join(map(str, self.at_hand[:number])))
        prepared = self._prepare(config, num_shards=number)
        with cannot_be_measured(), opened_probe(config, prepared) as probe:
            steps = self._sampler.by_size(probe, 0.35, at_most=-(-config.batch_size // number))
            link = probe.link()
        together = curve_of((size, typical(found, ForwardBackward)) for size, found in steps.items())
        overhead = rest_of(steps[min(steps)])
        return replace(
            profile,
            together={**profile.together, number: together},
            step=curve_of([*profile.step.points, (number, overhead)]),
            link=link,
        )

    def _network(self, profile: Profile) -> Profile:
        """Each layer by itself, then the best cuts."""
        config = replace(self._config, devices=str(self.at_hand[0]))
        names = self._prepare(config).task.chain(min(self._wanted.max_devices, 4)).names
        if len(names) < 2:
            raise ConfigError("it has one layer")
        layers = self._chain(profile, names, share=0.3, at_most=self._sampler.small_size)
        whole = sum(layer.forward.at(n) + layer.backward.at(n) for layer in layers for n, _ in layers[0].forward.points)
        profile = replace(profile, layers=layers)
        stages = dict(profile.stages)
        most = min(len(self.at_hand), self._wanted.max_devices, len(names), MAX_PROBED_STAGES)
        for number in range(2, most + 1):
            starts = best_starts(profile, number, self._sizes[len(self._sizes) // 2])
            stages[starts] = self._chain(profile, [names[0], *starts], share=0.3)
        if stages:  # a layer by itself costs more than within a stage: what the cut costs was counted for each
            measured = next(iter(stages.values()))
            total = sum(one.forward.at(n) + one.backward.at(n) for one in measured for n, _ in layers[0].forward.points)
            scale = min(1.0, total / whole)
            layers = tuple(
                one._replace(forward=one.forward.scaled(scale), backward=one.backward.scaled(scale)) for one in layers
            )
        return replace(profile, layers=layers, stages=stages)

    def _chain(
        self, profile: Profile, names: Sequence[str], share: float, at_most: int | None = None
    ) -> tuple[LayerCost, ...]:
        """Shards through stages that begin with these layers, a logical device for each."""
        number, device = len(names), str(self.at_hand[0])
        devices = ",".join(device if self.at_hand[0].kind == "cuda" else f"cpu:{n}" for n in range(number))
        config = replace(self._config, devices=devices, split=f"network={number}", stages=",".join(names[1:]))
        with cannot_be_measured(), opened_probe(config, self._prepare(config)) as probe:
            steps = self._sampler.by_size(probe, share, at_most)
            smallest = min(steps)
            kept = probe.run([smallest], counts_kept=True).kept_bytes
            entries = [len(replica.entries) for replica in probe.replicas]
        num_shards = len(steps[smallest][-1].of(Forward)) / number
        sent = {key: found / num_shards for key, found in steps[smallest][-1].sent_bytes.items()}

        def curve(kind: type, stage: int) -> Curve:
            return curve_of(
                (size, alone_seconds(found, kind, stage, partial(profile.slowed, num_samples=size)))
                for size, found in steps.items()
            )

        return tuple(
            LayerCost(
                name,
                curve(Forward, at),
                curve(Backward, at),
                entries[at],
                sent.get((ACTIVATIONS, at), 0) / smallest,
                kept[at] / smallest,
            )
            for at, name in enumerate(names)
        )

    def _slices(self, profile: Profile) -> Profile:
        config = replace(self._config, num_slices=self._config.num_slices or DEFAULT_SLICES)
        one = replace(config, devices=str(self.at_hand[0]))
        with cannot_be_measured(), opened_probe(one, self._prepare(one)) as probe:
            alone = self._sampler.by_size(probe, 0.3)
        device = self.at_hand[0]
        pair = f"{device},{device}" if device.kind == "cuda" else "cpu:0,cpu:1"
        two = replace(config, devices=pair, split="layers=2")
        with cannot_be_measured(), opened_probe(two, self._prepare(two)) as probe:
            shared = self._sampler.by_size(probe, 0.5)
        last = shared[min(shared)][-1]
        num_gathers, gathered = (found / len(last.of(ForwardBackward, rank=0)) for found in last.gathered)
        return replace(
            profile,
            sliced=Sliced(
                curve_of((size, typical(found, ForwardBackward)) for size, found in alone.items()),
                curve_of((size, typical(found, ForwardBackward)) for size, found in shared.items()),
                int(num_gathers),
                gathered / min(shared),
            ),
        )

    def _corrected(self, profile: Profile) -> Profile:
        """Whole steps of several devices, against the clock."""
        shards = [n for n in self._wanted.num_shards if -(-profile.batch_size // n) not in profile.left_out]
        until, found = self._clock() + CORRECTION_SHARE * self._wanted.seconds, dict[tuple[int, str], Curve]()
        measured = Corrections(self._config, shards, self._prepare, lambda: self._clock() < until)
        for number in self._at_the_same_time():
            self._log(f"measuring whole steps of {number} devices")
            found |= measured.of(profile, self.at_hand[:number])
        return replace(profile, corrections=found)

    # --- how ---

    def _prepare(self, config: RunConfig, num_shards: int = 1) -> Prepared:
        return prepare(replace(config, num_shards=max(config.num_shards, num_shards)), self._objects)

    def _at_the_same_time(self) -> list[int]:
        """Numbers of devices whose slow-down is measured: two, and all."""
        most = min(self._wanted.max_devices, len(self.at_hand))
        return sorted({number for number in (2, most) if 1 < number <= most})

    def _optional(self, profile: Profile, split: str, measure: Callable[[Profile], Profile]) -> Profile:
        """A split that cannot be measured is left out of the plan, with the reason."""
        try:
            how = replace(self._given, split=split, stages=self._given.stages if split == "network" else None)
            check_split(how, grid_of(how, 2), self._objects or UserObjects())  # refuses what a run would
            return measure(profile)
        except Interrupted:
            raise
        except LockstepError as problem:
            return replace(profile, problems={**profile.problems, split: first_line(problem)})


def single(config: RunConfig) -> RunConfig:
    """The settings of a run that is only measured: every split starts from the whole model on one device."""
    return replace(
        config, split="data", stages=None, engine="inprocess", update="replicated", balance="equal", trace=False,
        bucket_mb=0.0, verify_every=0, out=None, exchange="sharded", workers=0,
    )  # fmt: skip


def measure(config: RunConfig, objects: UserObjects | None, wanted: Wanted, log: Log) -> Profile:
    """What the steps of a run cost on the devices at hand."""
    with interruptible_clock() as clock:
        return Measurement(config, objects, wanted, log, clock).profile()
