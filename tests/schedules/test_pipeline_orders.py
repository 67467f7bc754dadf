"""The order of forward and backward passes in a pipeline."""

import pytest

from lockstep.schedules.pipeline_orders import BACKWARD, FORWARD, ORDERS, idle_share, max_in_flight, turns_of

PLACES = [(0, 1), (0, 1, 2), tuple(range(8)), (0, 1, 0), (0, 1, 2, 1, 0)]


def drawn(order, num_stages, place, num_shards):
    """Numbers are forward passes, letters backward passes."""
    turns = turns_of(order, tuple(range(num_stages)), place, range(num_shards))
    return "".join(str(turn.shard) if turn.kind == FORWARD else "abcdefgh"[turn.shard] for turn in turns)


def test_the_orders_of_the_text():
    assert [drawn("1f1b", 3, place, 5) for place in range(3)] == ["012a3b4cde", "01a2b3c4de", "0a1b2c3d4e"]
    assert [drawn("gpipe", 3, place, 5) for place in range(3)] == ["01234abcde"] * 3


def test_fewer_shards_than_stages():
    assert [drawn("1f1b", 4, place, 2) for place in range(4)] == ["01ab", "01ab", "01ab", "0a1b"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", PLACES, ids=str)
@pytest.mark.parametrize("shards", [range(1), range(3), range(4, 12)], ids=str)
def test_every_shard_goes_once_through_every_stage_in_both_directions(order, stages, shards):
    for place in range(max(stages) + 1):
        own = [stage for stage, at in enumerate(stages) if at == place]
        turns = turns_of(order, stages, place, shards)
        assert sorted(turns) == sorted((kind, s, n) for kind in (FORWARD, BACKWARD) for s in shards for n in own)
        for kind in (FORWARD, BACKWARD):
            for stage in own:  # additions of the tree rely on it
                assert [turn.shard for turn in turns if turn[::2] == (kind, stage)] == list(shards)


def test_1f1b_keeps_as_many_activations_as_there_are_stages_to_the_end():
    assert [max_in_flight("1f1b", (0, 1, 2), place, 8) for place in range(3)] == [3, 2, 1]
    assert [max_in_flight("1f1b", (0, 1, 2), place, 2) for place in range(3)] == [2, 2, 1]
    assert [max_in_flight("gpipe", (0, 1, 2), place, 8) for place in range(3)] == [8, 8, 8]
    assert [max_in_flight("1f1b", (0, 1, 0), place, 8) for place in range(2)] == [6, 3]  # one more a stage


@pytest.mark.parametrize(("num_stages", "num_shards"), [(2, 8), (3, 5), (4, 16), (8, 8)])
@pytest.mark.parametrize("order", ORDERS)
def test_the_idle_share_is_the_one_of_theory(order, num_stages, num_shards):
    """A clock on which every pass takes a second (backward two): (P - 1) / (S + P - 1) of the time is idle."""
    stages, done, at = tuple(range(num_stages)), {}, [0] * num_stages
    turns = [turns_of(order, stages, place, range(num_shards)) for place in stages]
    free = [0] * num_stages
    while any(at[place] < len(turns[place]) for place in stages):
        for place in stages:
            while at[place] < len(turns[place]):
                kind, shard, _ = turns[place][at[place]]
                last = place == num_stages - 1
                before = (kind, shard, place - 1) if kind == FORWARD else (kind, shard, place + 1)
                if kind == BACKWARD and last:
                    before = (FORWARD, shard, place)
                needs = 0 if kind == FORWARD and place == 0 else done.get(before)
                if needs is None:
                    break
                free[place] = max(free[place], needs) + (1 if kind == FORWARD else 2)
                done[kind, shard, place] = free[place]
                at[place] += 1
    busy = 3 * num_shards
    assert 1 - busy / max(free) == pytest.approx((num_stages - 1) / (num_shards + num_stages - 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_shards", [1, 2, 8, 33])
def test_equal_stages_are_idle_for_as_long_as_theory_says(order, num_stages, num_shards):
    expected = (num_stages - 1) / (num_shards + num_stages - 1)
    assert idle_share(order, tuple(range(num_stages)), num_shards) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", [(0, 1, 0), (0, 1, 2, 1, 0)], ids=str)
def test_stages_there_and_back_are_idle_less_the_more_shards_there_are(order, stages):
    shares = [idle_share(order, stages, num_shards) for num_shards in (1, 4, 16, 64)]
    assert sorted(shares, reverse=True) == shares
    assert shares[0] == pytest.approx(1 - 1 / (max(stages) + 1)), "one shard is at one rank at a time"
    assert shares[-1] < 0.1
