"""The sends and receives of one rank: each kind of value is taken from where it is, and put where it belongs."""

from lockstep.backends import Tensor
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.step_state import StepState
from lockstep.runtime.transport import GroupKey, TransferGroup, Transport
from lockstep.runtime.workspace import Workspace
from lockstep.schedules.instructions import Communicate, Parameters, Partial, Value, Wait


class Transfers:
    """Groups of transfers that are under way in one step."""

    def __init__(self, transport: Transport, workspace: Workspace) -> None:
        self._transport, self._workspace = transport, workspace
        self._groups: dict[GroupKey, Communicate] = {}

    def start(self, group: Communicate, state: StepState) -> None:
        """Starts a group."""
        key = GroupKey(group.channel, group.number, group.round)
        sends = [(send.to, _outgoing(send.value, state)) for send in group.sends]
        receives = [(source, self._memory(value, source)) for value, source in group.receives]
        self._transport.start(TransferGroup(key, sends, receives))
        self._groups[key] = group

    def finish(self, wait: Wait, state: StepState) -> None:
        """Waits for a group, and puts what has arrived where it belongs."""
        key = GroupKey(wait.channel, wait.number, wait.round)
        received = self._transport.finish(key)
        for (value, _), found in zip(self._groups.pop(key).receives, received, strict=True):
            match value:
                case Partial():
                    state.sums.put(value, found)
                case Parameters(entries):
                    assert state.replica is not None, "only steps have them"
                    state.replica.set_parameters(entries, found)
                case _:
                    state.passes.put(value, found)

    def _memory(self, value: Value, source: int) -> Tensor | None:
        """Where what is received is to be written; None: it is a reference, or the transport finds memory for it."""
        by_reference = self._transport.shares_memory_with(source)
        match value:
            case Partial():
                is_total = self._workspace.is_total(value)
                return self._workspace.memory(value) if is_total or not by_reference else None
            case Parameters(entries):
                return None if by_reference else self._workspace.zeros(len(entries))
            case _:
                return None


def _outgoing(value: Value, state: StepState) -> Tensor | StageTensors:
    match value:
        case Partial():
            return state.sums.vector(value)
        case Parameters(entries):
            assert state.replica is not None, "only steps have them"
            return state.replica.parameters(entries)
        case _:
            return state.passes.outgoing(value)
