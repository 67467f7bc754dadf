"""One training step, written once for every engine, framework and number of devices. Start here."""

from lockstep.steps.data import train_step

__all__ = ["train_step"]
