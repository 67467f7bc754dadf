"""Where a run begins: at the beginning, or after the last checkpoint in its folder."""

from lockstep.checkpoint import Checkpoints, check_same_run, identity_of, made_with
from lockstep.config import RunConfig
from lockstep.epochs import Start
from lockstep.evaluate import checked_weights
from lockstep.prepare import Prepared


def find_start(config: RunConfig, prepared: Prepared, resume: bool) -> Start:
    """Where the run in `config.out` begins: at its last checkpoint, if it is to go on and has one."""
    assert config.out is not None, "there is a folder"
    checkpoints = Checkpoints(config.out, config.keep_checkpoints)
    if not resume:
        return Start(checkpoints=checkpoints)
    task, notes = prepared.task, list[str]()
    newest = checkpoints.newest(notes.append)
    if newest is None:
        return Start(notes=[f"There is no checkpoint in {config.out}: beginning at step 1."], checkpoints=checkpoints)
    path, found = newest
    check_same_run(found, identity_of(config, task.data_sha256, task.num_train), config)
    checked_weights(task.initial, found.weights, path, config.model)
    now = made_with(prepared.backend.version(), prepared.devices)
    for name, value in now.items():
        if found.made_with.get(name) != value:
            notes.append(
                f"The checkpoint was made with another {name.replace('_', ' ')}, {found.made_with.get(name)}, and this "
                f"is {value}: from here on the bits may be others."
            )
    notes.append(f"going on after step {found.progress.step}")
    return Start(found, notes, checkpoints=checkpoints)
