"""One training step, written once for every engine, framework and number of devices. Start here."""

from lockstep.steps.data import train_step
from lockstep.steps.recorded import Steps, steps_for

__all__ = ["Steps", "steps_for", "train_step"]
