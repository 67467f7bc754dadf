"""The gradients of one step on their way between the ranks of one process."""

from collections.abc import Sequence

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.runtime.bucket_queue import Departures, WayOut
from lockstep.runtime.barrier import Arrivals
from lockstep.runtime.interpreter import Held, cut_into_chunks, take_part, total_of
from lockstep.schedules.exchanges.collective import Schedule, in_order
from lockstep.core.tracing import span


class Traffic:
    """Parts of vectors, each of which goes through the schedule's rounds when all ranks have it."""

    def __init__(
        self,
        backend: Backend,
        devices: Sequence[Device],
        schedule: Schedule,
        places: Sequence[range],
        timeout: float | None,
    ) -> None:
        self._backend, self._devices, self._schedule, self.places = backend, devices, schedule, places
        self._held: list[list[Held]] = [[{} for _ in devices] for _ in places]  # of a part, of a rank
        self._departures = [Departures() for _ in devices]
        # who takes parts through the rounds beside a rank waits as long as the rank does: that one has the deadline
        self._arrivals = Arrivals(len(devices), timeout=None if self.is_beside else timeout)

    @property
    def is_beside(self) -> bool:
        """Whether parts leave before backward is over, so that another thread than the rank's own exchanges them."""
        return len(self.places) > 1

    def way_out(self, rank: int) -> WayOut:
        """How the gradients of a rank leave."""
        return WayOut(self.places, self._departures[rank].leave)

    def travel(self, rank: int) -> Tensor:
        """The rank's share in the exchange of all parts; gives the total."""
        try:
            for number, round_ in in_order(len(self.places), len(self._schedule.rounds)):
                self.go_on(rank, number, round_)
                self._backend.synchronize(self._devices[rank])
                if round_ < len(self._schedule.rounds):  # from the last round on, it needs nobody else
                    self._arrivals.wait(rank)
            total = self.total(rank)
            self._backend.synchronize(self._devices[rank])
            return total
        except BaseException:
            self.cancel()  # the others would wait
            raise

    def go_on(self, rank: int, number: int, round_: int) -> None:
        """Begins a round of a part, which ends the one before: the rank has what it needs for it."""
        held = self._held[number]
        nodes = self._departures[rank].wait_for(number) if round_ == 0 else None
        with span("exchange"):
            if nodes is not None:
                held[rank] = cut_into_chunks(self._backend, nodes, len(self.places[number]), self._schedule)
            else:
                take_part(self._backend, self._devices[rank], rank, self._schedule.rounds[round_ - 1], held)

    def total(self, rank: int) -> Tensor:
        """The sum of all ranks' vectors, when all rounds are over."""
        with span("exchange"):
            totals = [total_of(self._backend, held[rank], self._schedule) for held in reversed(self._held)]
            return totals[0] if len(totals) == 1 else self._backend.concat(totals)

    def cancel(self) -> None:
        """Sends everybody home who waits, now or later."""
        self._arrivals.cancel()
        for departures in self._departures:
            departures.cancel()
