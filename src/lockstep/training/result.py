"""The result of a run, its peak memory, and the files of a run that stopped."""

from collections.abc import Sequence

from lockstep.backends import peak_memory
from lockstep.config import RunConfig
from lockstep.core.layout import Array, sha256_of
from lockstep.report.events import EpochDone, Result
from lockstep.runtime.engine import Engine
from lockstep.training.checkpoint import Progress
from lockstep.training.task import Task

PICTURED = ("data", "batch_size", "num_shards", "optimizer", "learning_rate", "seed", "num_epochs", "backend")


def result_of(
    config: RunConfig, task: Task, engine: Engine, progress: Progress, weights: dict[str, Array], peaks: dict[str, int]
) -> Result:
    """The result of a run that ended with these weights."""
    history, seconds = progress.history, sum(done.seconds for done in progress.history) + progress.seconds
    num_epochs, more_steps = divmod(progress.step, -(-task.num_train // config.batch_size))
    num_samples = num_epochs * task.num_train + more_steps * config.batch_size  # a run may stop in mid-epoch
    buffers = [name for name in weights if name not in set(task.parameters)]
    return Result(
        test_accuracy=history[-1].test_accuracy if history else None,
        metrics=history[-1].metrics if history else {},
        seconds_per_epoch=seconds * task.num_train / max(1, num_samples),
        samples_per_second=num_samples / seconds if seconds else 0.0,
        backend=engine.backend.name,
        backend_version=engine.backend.version(),
        devices=[str(device) for device in engine.devices],
        peak_memory=peaks,
        steps=progress.step,
        first_loss=progress.first_loss,
        weights_sha256=sha256_of([weights[name] for name in task.parameters]),
        buffers_sha256=sha256_of([weights[name] for name in buffers]) if buffers else None,
        history=history,
        run=config.out,
        notes=progress.notes,
        settings={"model": task.model, **{name: getattr(config, name) for name in PICTURED}},
        params={name: weights[name] for name in task.parameters},
        buffers={name: weights[name] for name in buffers},
        module=task.trained(weights),
    )


def peaks_of(engine: Engine) -> dict[str, int]:
    """The peak memory of all devices, in bytes; the logical CPU devices of one process have one value."""
    own_devices = [engine.devices[rank] for rank in engine.local_ranks]
    peaks = peak_memory(engine.backend, own_devices)
    if len(own_devices) < engine.num_ranks and "cpu" in peaks:  # every rank is a process
        is_one_machine = len(set(engine.devices)) == engine.num_ranks
        peaks = {str(own_devices[0]) if is_one_machine else f"rank {engine.local_ranks[0]}": peaks["cpu"]}
    gathered = engine.all_gather([peaks for _ in own_devices])
    return {name: peak for of_rank in gathered for name, peak in of_rank.items()}


def what_is_left(config: RunConfig, history: Sequence[EpochDone]) -> str:
    """Where the files of a run that stopped are, as a sentence."""
    if config.out is None:
        return ""
    has = f" and the weights after epoch {len(history)}" if history else ""
    return f" The metrics{has} are in {config.out}. To start over, remove it or choose another --out."
