"""Where a run begins: at the beginning, or after the last checkpoint in its folder."""

from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError
from lockstep.report.runlog import read_settings
from lockstep.training.checkpoint import Checkpoints, check_length, check_same_run, identity_of, made_with
from lockstep.training.loop import ResumePoint
from lockstep.training.setup import Prepared
from lockstep.training.weights import checked_weights


def find_resume_point(config: RunConfig, prepared: Prepared, resume: bool) -> ResumePoint:
    """Where the run in `config.out` begins: at its last checkpoint, if it is resumed and has one."""
    assert config.out is not None, "there is a folder"
    checkpoints = Checkpoints(config.out, config.keep_checkpoints)
    if not resume:
        return ResumePoint(checkpoints=checkpoints)
    task, notes = prepared.task, list[str]()
    newest = checkpoints.newest(notes.append)
    identity = identity_of(config, task.data_sha256, task.num_train)
    if newest is None:
        if (config.out / "result.json").exists():
            raise ConfigError(
                f"The run in {config.out} is finished, and its checkpoints are gone: there is nothing to resume from, "
                f"and a run is never written over. Choose another --out."
            )
        if (config.out / "config.json").exists():
            recorded = read_settings(config.out)
            check_same_run({**identity, **{n: recorded[n] for n in identity if n in recorded}}, identity, config)
        return ResumePoint(
            notes=[f"There is no checkpoint in {config.out}: beginning at step 1."], checkpoints=checkpoints
        )
    path, found = newest
    check_same_run(found.run, identity, config)
    check_length(found.progress, config, task.num_train)
    checked_weights(task.initial, found.weights, path, config.model)
    now = made_with(prepared.backend.version(), prepared.devices)
    for name, value in now.items():
        if found.made_with.get(name) != value:
            notes.append(
                f"The checkpoint was made with another {name.replace('_', ' ')}, {found.made_with.get(name)}, and this "
                f"is {value}: from here on the bits may be others."
            )
    if len(found.progress.history) == config.num_epochs:
        notes.append(f"all {config.num_epochs} epochs are done already; for more, use --epochs")
    else:
        notes.append(f"continuing after step {found.progress.step}")
    return ResumePoint(found, notes, checkpoints=checkpoints)
