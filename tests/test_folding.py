"""Every way of folding four and eight ranks computes what one process computes."""

import pytest
from harness import assert_equals, run_layouts

import parallel


def factorizations(n, parts):
    """Every tuple of `parts` factors of n."""
    if parts == 1:
        return [(n,)]
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in factorizations(n // d, parts - 1)]


def layouts(world):
    """{name: knobs} of every layout of `world` ranks."""
    found = {}
    for pp in (1,):
        for tp, cp, dp in factorizations(world // pp, 3):
            for etp, ep, edp in factorizations(world // pp, 3):
                knobs = dict(pp=pp, tp=tp, cp=cp, ep=ep, etp=etp)
                found["·".join(f"{k}{v}" for k, v in dict(knobs, dp=dp, edp=edp).items() if v > 1)] = knobs, dp
    return found


def check(pool, tokens, chosen, world, batch, size=4, **more):
    """Runs layouts, all with accumulation 3, dropless, ragged sequences and pairs, and compares with one process."""
    base = dict(data=tokens, global_batch=batch, **more)
    ref = pool.run(1, run_layouts, [dict(base, micro_batch=batch)], 1)[0][0]
    names = list(chosen)
    for at in range(0, len(names), size):
        variants = [dict(base, micro_batch=batch // 3 // dp, **knobs) for knobs, dp in
                    (chosen[name] for name in names[at:at + size])]
        results = pool.run(world, run_layouts, variants, world)
        for rank, found in enumerate(results):
            for name, result in zip(names[at:], found):
                assert_equals(ref, result, what=f"{name}, rank {rank}")


FOUR = layouts(4)


@pytest.mark.parametrize("at", range(0, len(FOUR), 6))
def test_every_layout_of_four_ranks(pool, tokens, at):
    check(pool, tokens, dict(list(FOUR.items())[at:at + 6]), 4, 12, size=6)
