"""What comes out of a run: its result, its peak memory, its trace, and where to find what is left of it."""

from collections.abc import Sequence

from lockstep.backends import peak_memory
from lockstep.config import RunConfig
from lockstep.core.layout import Array, sha256_of
from lockstep.core.tracing import Span, chrome_trace, lost_time
from lockstep.report.events import EpochDone, Result, Traced
from lockstep.runtime.engine import Engine
from lockstep.training.checkpoint import Progress
from lockstep.training.task import Task


def result_of(
    config: RunConfig, task: Task, engine: Engine, progress: Progress, weights: dict[str, Array], peaks: dict[str, int]
) -> Result:
    """The result of a run that has come to its end with these weights."""
    history = progress.history
    seconds_per_epoch = sum(done.seconds for done in history) / len(history)
    buffers = [name for name in weights if name not in set(task.parameters)]
    return Result(
        test_accuracy=history[-1].test_accuracy,
        metrics=history[-1].metrics,
        seconds_per_epoch=seconds_per_epoch,
        samples_per_second=task.num_train / seconds_per_epoch,
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
        params={name: weights[name] for name in task.parameters},
        buffers={name: weights[name] for name in buffers},
        module=task.trained(weights),
    )


def peaks_of(engine: Engine) -> dict[str, int]:
    """The peak memory of all devices, in bytes; logical CPU devices of one process share one."""
    own_devices = [engine.devices[rank] for rank in engine.local_ranks]
    peaks = peak_memory(engine.backend, own_devices)
    if len(own_devices) < engine.num_ranks and "cpu" in peaks:  # every rank is a process
        is_one = len(set(engine.devices)) == engine.num_ranks  # else there are several machines
        name = str(own_devices[0]) if is_one else f"rank {engine.local_ranks[0]}"
        peaks = {name: peaks["cpu"]}
    gathered = engine.all_gather([peaks for _ in own_devices])
    return {name: peak for of_rank in gathered for name, peak in of_rank.items()}


def traced_by(engine: Engine) -> Traced:
    """What all ranks did, and what a perfect speed-up lost."""
    ranks, exchanges = (
        [[Span(*one) for one in spans] for spans in engine.all_gather([[list(one) for one in spans] for spans in own])]
        for own in ([trace.spans for trace in engine.traces], [trace.exchange.spans for trace in engine.traces])
    )
    devices = [str(device) for device in engine.devices]
    return Traced(chrome_trace(ranks, exchanges, devices), lost_time(ranks).sentence(len(devices)))


def what_is_left(config: RunConfig, history: Sequence[EpochDone]) -> str:
    """Where to find what there is of a run that stopped."""
    if config.out is None:
        return ""
    has = f" and the weights after epoch {len(history)}" if history else ""
    return f" The metrics{has} are in {config.out}. To begin anew, remove it or choose another --out."
