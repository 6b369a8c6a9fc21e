"""The pipeline's schedules, simulated: every unit once, no waiting in a circle, idle time as by the formula."""

from fractions import Fraction

import pytest
from parallel import bubble, in_flight, schedule, send_window, warm_up

FORWARD, BACKWARD = 1, 2    # how long a unit takes


def sizes(most_pp=8, most_vpp=4, most_m=32):
    """Every (pp, vpp, m) that is not refused."""
    return [(pp, vpp, m) for pp in range(1, most_pp + 1) for vpp in range(1, most_vpp + 1)
            for m in range(1, most_m + 1) if vpp == 1 or m % pp == 0]


def cells_of(pp, vpp, m, pair):
    return [schedule(stage, pp, vpp, m, pair) for stage in range(pp)]


def needs(kind, j, last):
    """What (kind, virtual stage j) of a microbatch waits for: (kind, virtual stage), or None."""
    if kind == "F":
        return ("F", j - 1) if j else None
    return ("B", j + 1) if j < last else ("F", j)


def simulate(cells, pp, vpp, window):
    """Runs all stages. A cell starts when what it needs is there; a stage that sent a message waits for the one
    `window` before it to have been taken. → the time it takes, or None if stages wait for each other."""
    todo, last = [mine[::-1] for mine in cells], pp * vpp - 1
    clock, done, taken = [0] * pp, {}, {}
    sent = [{"F": [], "B": []} for _ in range(pp)]
    moved = True
    while moved:
        moved = False
        for stage in range(pp):
            while todo[stage]:
                units = [(kind, chunk * pp + stage, i) for kind, chunk, i in todo[stage][-1]]
                wanted = [(*needed, i) for kind, j, i in units if (needed := needs(kind, j, last))]
                full = [out[-1 - window] for out in sent[stage].values() if len(out) > window]
                if any(w not in done for w in wanted) or any(f not in taken for f in full):
                    break
                start = max([clock[stage], *(done[w] for w in wanted), *(taken[f] for f in full)])
                taken.update((w, start) for w in wanted)
                clock[stage] = start + sum(FORWARD if kind == "F" else BACKWARD for kind, _, _ in units)
                for kind, j, i in units:
                    done[kind, j, i] = clock[stage]
                    if j != (last if kind == "F" else 0):
                        sent[stage][kind].append((kind, j, i))
                todo[stage].pop()
                moved = True
    return None if any(todo) else max(clock)


def messages(cells, pp, vpp):
    """{(kind, sender, receiver, goes round): [numbers in order]} as sent and as received."""
    sent, received = {}, {}
    for stage, mine in enumerate(cells):
        for kind, chunk, i in (part for cell in mine for part in cell):
            j, step = chunk * pp + stage, 1 if kind == "F" else -1
            for peer, trace in ((j + step, sent), (j - step, received)):
                if 0 <= peer < pp * vpp:
                    ends = (stage, peer % pp) if trace is sent else (peer % pp, stage)
                    goes_round = ends[1] - ends[0] != step
                    message = (j, i) if trace is sent else (peer, i)
                    trace.setdefault((kind, *ends, goes_round), []).append(message)
    return sent, received


@pytest.mark.parametrize("pair", [False, True], ids=["one at a time", "pair"])
def test_every_unit_once_in_an_order_that_works(pair):
    for pp, vpp, m in sizes():
        cells = cells_of(pp, vpp, m, pair)
        for stage, mine in enumerate(cells):
            parts = [part for cell in mine for part in cell]
            for kind in "FB":
                units = [(chunk, i) for k, chunk, i in parts if k == kind]
                assert sorted(units) == [(chunk, i) for chunk in range(vpp) for i in range(m)], (pp, vpp, m, stage)
            for cell in mine:
                kinds, units = {kind for kind, _, _ in cell}, {(chunk, i) for _, chunk, i in cell}
                assert 1 <= len(cell) <= 1 + pair and len(kinds) == len(units) == len(cell), "a unit beside itself"
        sent, received = messages(cells, pp, vpp)
        assert sent == received, "messages are matched by their order alone"


@pytest.mark.parametrize("pair", [False, True], ids=["one at a time", "pair"])
def test_stages_idle_as_long_as_the_formula_says(pair):
    for pp, vpp, m in sizes():
        time = simulate(cells_of(pp, vpp, m, pair), pp, vpp, send_window(pp, vpp))
        assert time is not None, ("stages wait for each other", pp, vpp, m)
        idle = 1 - Fraction((FORWARD + BACKWARD) * vpp * m, time)
        assert idle == Fraction(pp - 1, vpp * m + pp - 1), (pp, vpp, m)
        assert bubble(pp, vpp, m) == pytest.approx(float(idle))


@pytest.mark.parametrize("pair", [False, True], ids=["one at a time", "pair"])
def test_units_in_flight_are_as_many_as_the_start_table_says(pair):
    for pp, vpp, m in sizes():
        for stage, mine in enumerate(cells_of(pp, vpp, m, pair)):
            alive = most = 0
            for kind, _, _ in (part for cell in mine for part in cell):
                alive += 1 if kind == "F" else -1
                most = max(most, alive)
            assert alive == 0 and most == in_flight(stage, pp, vpp, m, pair), (pp, vpp, m, stage)
            assert most <= send_window(pp, vpp)


def test_known_schedules():
    """By hand: the first stage of two, and one of two with two chunks each."""
    F, B = (lambda *unit: ("F", *unit)), (lambda *unit: ("B", *unit))
    assert schedule(0, 2, 1, 3, False) == [[F(0, 0)], [F(0, 1)], [B(0, 0)], [F(0, 2)], [B(0, 1)], [B(0, 2)]]
    assert schedule(1, 2, 1, 2, True) == [[F(0, 0)], [F(0, 1), B(0, 0)], [B(0, 1)]]
    assert schedule(1, 2, 2, 2, False) == [[F(0, 0)], [F(0, 1)], [F(1, 0)], [B(1, 0)], [F(1, 1)], [B(1, 1)],
                                           [B(0, 0)], [B(0, 1)]]
    assert [warm_up(s, 4, 1, 32, False) for s in range(4)] == [3, 2, 1, 0]
    assert [warm_up(s, 4, 1, 32, True) for s in range(4)] == [7, 5, 3, 1]
    assert [warm_up(s, 4, 2, 32, False) for s in range(4)] == [10, 8, 6, 4]


def test_the_simulation_sees_what_is_wrong():
    """Pairs with only one more warm-up unit work, but idle far longer; two orders that wait for ever."""
    cells = cells_of(4, 1, 32, True)
    for stage, mine in enumerate(cells):
        ahead = 4 - stage
        units = [[("F", 0, i)] for i in range(32)]
        mine[:] = units[:ahead] + [(units[i + ahead] if i + ahead < 32 else []) + [("B", 0, i)] for i in range(32)]
    assert 1 - 96 / simulate(cells, 4, 1, 32) > 0.4
    swapped = cells_of(2, 1, 2, False)
    swapped[0] = [[("F", 0, 1)], [("B", 0, 0)], [("F", 0, 0)], [("B", 0, 1)]]
    assert simulate(swapped, 2, 1, 32) is None
    assert simulate(cells_of(4, 1, 8, False), 4, 1, 0) is None, "each waits until its message is taken"
