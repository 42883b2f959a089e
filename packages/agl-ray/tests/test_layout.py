"""Adding up the resources that an experiment needs, without Ray."""

import pytest

from agl.algorithms import PlacementConfig
from agl.errors import ConfigError
from agl_ray.layout import Room, Share, no_room, share_of


def _share(name: str, *, cpus: float = 1.0, gpus: float = 0.0, strategy: str = "PACK") -> Share:
    return Share(name=name, amounts={"CPU": cpus, "GPU": gpus}, strategy=strategy)


def test_share_has_what_the_table_says() -> None:
    given = PlacementConfig(num_cpus=0, num_gpus=1, memory="2GB", custom={"desk": 0.5}, strategy="SPREAD")
    share = share_of("algorithm 'a'", given, cpus=1.0)
    assert ({"GPU": 1, "memory": 2 << 30, "desk": 0.5}, "SPREAD") == (share.amounts, share.strategy)


def test_share_without_a_table_has_the_usual_cpus() -> None:
    assert {"CPU": 0.5} == share_of("each worker", None, cpus=0.5).amounts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PlacementConfig(num_cpus=-1), "each worker asks for -1 CPU; write 0 or more"),
        (PlacementConfig(num_gpus=1.5), "asks for 1.5 GPUs; write a whole number, or a part of one GPU"),
        (PlacementConfig(memory="lots"), "resources.memory of each worker is 'lots'; write a size such as 512MB"),
        (PlacementConfig(custom={"GPU": 1}), "has 'GPU'; write num_cpus, num_gpus or memory for it"),
        (PlacementConfig(num_cpus=0), "each worker asks for nothing of the cluster"),
    ],
)
def test_share_that_nobody_can_have_is_refused(given: PlacementConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share_of("each worker", given, cpus=0.5)


MACHINES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("strategy", "cpus", "missing"),
    [
        ("PACK", (4, 4), 0),
        ("PACK", (3, 3, 3), 1),
        ("SPREAD", (1, 1, 1), 0),
        ("STRICT_SPREAD", (1, 1), 0),
        ("STRICT_SPREAD", (1, 1, 1), 1),
        ("STRICT_PACK", (2, 2), 0),
        ("STRICT_PACK", (3, 3), 2),
    ],
)
def test_room_keeps_to_the_strategy(strategy: str, cpus: tuple[float, ...], missing: int) -> None:
    shares = [_share(str(number), cpus=amount, strategy=strategy) for number, amount in enumerate(cpus)]
    assert missing == len(Room(MACHINES).place(shares))


def test_spread_takes_a_machine_of_its_own_where_there_is_one() -> None:
    room = Room(MACHINES)
    assert [] == room.place([_share("a", cpus=1, strategy="SPREAD"), _share("b", cpus=1, strategy="SPREAD")])
    assert [_share("c", cpus=4)] == room.place([_share("c", cpus=4)])


def test_room_counts_what_fits_beside_reservations() -> None:
    room = Room(MACHINES)
    assert [] == room.place([_share("a", cpus=3.5, gpus=1)])
    assert 9 == room.count(_share("worker", cpus=0.5), most=20)


def test_missing_room_is_explained() -> None:
    alone, besides = no_room(_share("a", gpus=2), MACHINES), no_room(_share("b", gpus=1), MACHINES)
    assert "a asks for 1 CPU, 2 GPU, and the most that one machine of the cluster has is 4 CPU, 1 GPU" == alone
    assert (
        "b asks for 1 CPU, 1 GPU besides the rest of the experiment, and the whole cluster has 8 CPU, 2 GPU" == besides
    )
