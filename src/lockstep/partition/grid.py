"""Ranks in a grid: which of them share a batch, a network, and layers; `--split data=2,network=2`."""

from typing import NamedTuple

from lockstep.core.errors import ConfigError

SPLITS = ("data", "network", "layers")
AUTO = "auto"  # chosen for the model and the devices, when a run starts


class Coordinates(NamedTuple):
    """Where a rank is in the grid."""

    data: int
    network: int  # its stage
    layers: int


class Grid(NamedTuple):
    """How many ways the data, the network and its layers are split; the product is the number of ranks.

    Ranks that share layers communicate most, so they are neighbours; then come the stages of a network.

    >>> grid = Grid(data=2, network=2)
    >>> [tuple(grid.at(rank)) for rank in range(grid.num_ranks)]
    [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    >>> grid.replicas_of(1)
    (1, 3)
    """

    data: int = 1
    network: int = 1
    layers: int = 1

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.data * self.network * self.layers

    @property
    def num_parts(self) -> int:
        """Parts of the model that ranks hold."""
        return self.network * self.layers

    def at(self, rank: int) -> Coordinates:
        """Where a rank is."""
        rest, layer = divmod(rank, self.layers)
        return Coordinates(rest // self.network, rest % self.network, layer)

    def rank(self, at: Coordinates) -> int:
        """Who is there."""
        return (at.data * self.network + at.network) * self.layers + at.layers

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of the model, in the order of their data; this one is among them."""
        return tuple(range(rank % self.num_parts, self.num_ranks, self.num_parts))

    @property
    def kind(self) -> str:
        """The way of splitting that decides most about the time of a step."""
        return "layers" if self.layers > 1 else "network" if self.network > 1 else "data"

    @property
    def splits_model(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.num_parts > 1

    def __str__(self) -> str:
        named = zip(SPLITS, (self.data, self.network, self.layers), strict=True)
        return ",".join(f"{name}={number}" for name, number in named if number > 1) or "data=1"


def parse_split(text: str) -> dict[str, int | None]:
    """How many ways each is split, as it is written; None: as many as there are devices.

    >>> parse_split("data=2,network=2")
    {'data': 2, 'network': 2}
    >>> parse_split("layers")
    {'layers': None}
    """
    if text == AUTO:
        raise ConfigError(
            "--split auto is chosen when a run starts (lockstep train, lockstep.train). Here, name one: data, network, "
            "layers."
        )
    found: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, number = part.partition("=")
        if name not in SPLITS or name in found or (equals and not (number.isdecimal() and 1 <= int(number) <= 4096)):
            raise ConfigError(
                f"--split {text} cannot be read at {part or 'its end'!r}. There are {', '.join(SPLITS)}, alone or with "
                f"numbers of devices whose product is used: --split network, --split data=2,network=2."
            )
        found[name] = int(number) if equals else None
    if len(found) > 1 and None in found.values():
        raise ConfigError(f"--split {text} needs a number for each: --split data=2,network=2.")
    return found


def num_devices_of(text: str) -> int | None:
    """The number of devices that a split says, if it says one."""
    found, product = parse_split(text), 1
    for number in found.values():
        if number is None:
            return None
        product *= number
    return product


def grid_for(text: str, num_devices: int) -> Grid:
    """The grid of a split on so many devices.

    >>> grid_for("network", 3)
    Grid(data=1, network=3, layers=1)
    """
    found = {name: num_devices if number is None else number for name, number in parse_split(text).items()}
    grid = Grid(**found)
    if grid.num_ranks != num_devices:
        alone = next(iter(found)) if len(found) == 1 else ""
        hint = f", or --split {alone} for all of them" if alone else ", or another --split"
        raise ConfigError(
            f"--split {text} is for {grid.num_ranks} device{'s' * (grid.num_ranks > 1)}, and there are {num_devices}. "
            f"Use as many (--devices {grid.num_ranks}){hint}."
        )
    return grid
