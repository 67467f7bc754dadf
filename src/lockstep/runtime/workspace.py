"""Memory for the values of an exchange, kept from step to step where the framework can write in place.

The parts of the total lie in one vector, so nothing has to be joined at the end. What is received, and sums of it, have
memory of their own. A rank's own nodes are not here: they are new in every step, and few are alive at a time.
"""

from collections.abc import Sequence

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.schedules.instructions import Add, Communicate, Partial, RankProgram, Update


class Workspace:
    """The memory of one rank for one schedule."""

    def __init__(self, backend: Backend, device: Device, program: RankProgram) -> None:
        self._backend, self._device = backend, device
        parts = [part for i in program.update if isinstance(i, Update) for part in i.total]
        self._parts, self._joins = frozenset(parts), len(parts) > 1
        self._entries = range(parts[0].entries.start, parts[-1].entries.stop) if parts else range(0)
        self._stays: set[Partial] = set()
        for instruction in program.exchange:
            if isinstance(instruction, Communicate):
                self._stays.update(value for value, _ in instruction.receives if isinstance(value, Partial))
            elif isinstance(instruction, Add) and self._stays.intersection(instruction.parts):
                self._stays.add(instruction.total)
        self._memory: dict[Partial, Tensor] = {}
        self._total: Tensor = None
        self._written: set[Partial] = set()  # parts of the total, in this step
        self.accumulates = False  # other sums are written over their left parts

    def use_as_total(self, vector: Tensor | None) -> None:
        """The total is to be written into the memory of `vector`, and leaves may be overwritten on the way."""
        if self._backend.capabilities.writes_in_place:
            self._total, self._joins, self.accumulates = vector, True, True

    def is_total(self, value: Partial) -> bool:
        """Whether `value` has a place in the vector of the total."""
        return self._joins and value in self._parts

    def memory(self, value: Partial) -> Tensor | None:
        """Where to write `value`; None: to new memory."""
        if not self._backend.capabilities.writes_in_place:
            return None
        if self.is_total(value):
            if self._total is None:
                self._total = self.zeros(len(self._entries))
            self._written.add(value)
            start = value.entries.start - self._entries.start
            return self._backend.chunk(self._total, start, start + len(value.entries))
        if value not in self._stays or self.accumulates:
            return None
        if value not in self._memory:
            self._memory[value] = self.zeros(len(value.entries))
        return self._memory[value]

    def zeros(self, num_entries: int) -> Tensor:
        """A new vector."""
        return self._backend.zeros(num_entries, self._device)

    def joined(self, parts: Sequence[Partial], tensors: list[Tensor]) -> Tensor:
        """The parts of the total as one vector."""
        if not self._joins:
            return tensors[0]
        if not self._backend.capabilities.writes_in_place:
            return self._backend.concat(tensors)
        for part, tensor in zip(parts, tensors, strict=True):
            if part not in self._written:  # it is a part of the rank's own node: nobody else has shards
                self._backend.assign(self.memory(part), tensor)
        self._written.clear()
        return self._total
