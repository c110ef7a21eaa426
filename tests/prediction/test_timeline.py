"""The predicted time of a step: overlap and waits."""

import pytest

from partita.prediction.machine import REACHED, machine_named
from partita.prediction.step_timeline import HOST, Job, UnitTimes, simulate_step
from partita.table.mesh_shape import MeshShape


def units(num: int, **jobs: float) -> list[UnitTimes]:
    return [UnitTimes(1.0, 2.0, **jobs)] * num  # type: ignore[arg-type]


@pytest.mark.parametrize("num_micros", [1, 2, 3, 10])
def test_a_step_that_waits_for_nothing_computes(num_micros: int) -> None:
    time = simulate_step(units(5), num_micros, reduces_each=False)
    assert time.total_s == time.compute_s == pytest.approx(15.0 * num_micros)
    assert not time.waits_s


def test_gathers_hide_behind_computing_but_the_first_of_each_pass_does_not() -> None:
    time = simulate_step(units(5, gather=0.5, gather_again=0.5), 1, reduces_each=False)
    assert time.total_s == pytest.approx(16.0)
    assert time.waits_s == {"ranks": pytest.approx(1.0)}


def test_gathers_that_are_slower_than_computing_are_what_a_forward_takes() -> None:
    time = simulate_step(units(5, gather=3.0), 1, reduces_each=False)
    assert time.total_s == pytest.approx(5 * 3.0 + 1.0 + 10.0)


def test_the_last_sum_is_waited_for() -> None:
    time = simulate_step(units(5, reduce=1.5), 1, reduces_each=True)
    assert time.total_s == pytest.approx(16.5)
    slow = simulate_step(units(5, reduce=4.0), 1, reduces_each=True)
    assert slow.total_s == pytest.approx(5.0 + 2.0 + 5 * 4.0)


def test_sums_after_each_micro_batch_take_longer_than_one() -> None:
    each, once = (simulate_step(units(5, reduce=4.0), 8, reduces_each=each).total_s for each in (True, False))
    assert each > 1.2 * once


def test_updates_on_the_host_hide_behind_the_forward() -> None:
    quick, slow = (simulate_step(units(5, update=s, updated_by=HOST), 1, reduces_each=False) for s in (0.5, 2.0))
    assert quick.total_s == pytest.approx(15.5)
    assert slow.total_s == pytest.approx(5 * 2.0 + 1.0 + 10.0)
    assert slow.waits_s[HOST] == pytest.approx(6.0)


def test_the_disk_is_waited_for_where_it_stores_the_last_gradient() -> None:
    time = simulate_step(units(5, swap_gradient=4.0), 2, reduces_each=True)
    assert time.total_s == pytest.approx(5.0 + 2.0 + 5 * 4.0 + 5 * 8.0), "written, then read and written"
    assert time.waits_s.keys() == {"disk"}


def test_a_stage_waits_for_others_in_proportion_to_its_work() -> None:
    alone = simulate_step(units(4), 8, reduces_each=False)
    time = alone.in_pipeline(3 / 8)
    assert time.total_s == pytest.approx(alone.total_s * (8 + 3) / 8)
    assert time.waits_s["pipeline"] == pytest.approx(alone.total_s * 3 / 8)


def test_sums_are_completed_before_the_update() -> None:
    jobs = list[Job]()
    simulate_step(units(2, reduce=0.5, complete=0.25, update=0.5), 2, reduces_each=True, jobs=jobs)
    of_first = [
        (job.what, job.stop_s - job.start_s) for job in jobs if job.unit == 0 and job.what in ("reduce", "update")
    ]
    assert of_first == [("reduce", 0.25), ("update", 0.5), ("reduce", 0.5), ("reduce", 0.5)]


def test_a_group_within_a_node_has_its_links_and_one_across_shares_the_network() -> None:
    machine = machine_named("h100")
    mesh = MeshShape(pipeline=2, data=8, tensor=4)  # 64 GPUs, 8 on a node
    assert machine.group_rate(("tensor",), mesh, 64) == REACHED * machine.node_link
    assert machine.group_rate(("data",), mesh, 64) == REACHED * machine.network / 4  # shared by the 4 groups on a node
    assert machine.group_rate(("pipeline",), mesh, 64) == REACHED * machine.network / 8
    assert machine.group_rate(("data",), MeshShape(data=64), 64) == REACHED * machine.network
    assert machine.group_rate(("data",), MeshShape(data=8), 8) == REACHED * machine.node_link
