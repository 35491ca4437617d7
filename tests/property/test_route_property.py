"""Properties of routes: what a loss moves, how a step is shared, and that only the view and the stage matter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.route import routes
from protocol.view import Replica, View

NAMES = st.text("abcdef0123456789", min_size=4, max_size=12)
SHARES = st.floats(0.1, 10.0)
REPLICAS = st.lists(
    st.builds(Replica, NAMES, st.just(()), SHARES | st.just(0.0), SHARES | st.just(0.0)),
    min_size=2,
    max_size=7,
    unique_by=lambda replica: replica.peer,
)
STEPS = st.integers(1, 2**32 - 1)
COUNTS = st.integers(1, 40)


def one_stage(replicas: list[Replica], first_step: int = 1) -> View:
    return View(1, first_step, 9, (tuple(replicas),))


def has_share(view: View, step: int) -> bool:
    return bool(view.group(0, step))


@given(REPLICAS, STEPS, st.integers(-2, 2), COUNTS, st.data())
def test_over_any_losses_only_the_lost_ones_microbatches_move(
    replicas: list[Replica], step: int, from_here: int, count: int, data: st.DataObject
) -> None:
    """Whatever is planned: shares differ before and from `first_step`; some join, some drain."""
    view = one_stage(replicas, max(1, step + from_here))
    number = 1
    while has_share(view, step):
        before = routes(view, 0, step, count)
        gone, number = data.draw(st.sampled_from([r.peer for r in view.stages[0] if r.alive])), number + 1
        stage = tuple(replace(r, lost=number) if r.peer == gone and r.alive else r for r in view.stages[0])
        if data.draw(st.booleans()):
            stage = (*stage, Replica(gone, (), 0.0, 0.0, step + 3))  # it is back, as a learner
        view = replace(view, number=number, stages=(stage,))
        if has_share(view, step):
            after = routes(view, 0, step, count)
            assert gone not in after and set(after) <= set(view.group(0, step))
            assert all(old == new for old, new in zip(before, after, strict=True) if old != gone)
        if number > 12:
            return


@given(REPLICAS, STEPS, COUNTS)
def test_each_has_its_quota_to_within_one(replicas: list[Replica], step: int, count: int) -> None:
    view = one_stage(replicas)
    if not has_share(view, step):
        return
    counts, total = Counter(routes(view, 0, step, count)), sum(r.weight for r in replicas)
    assert counts.total() == count
    assert all(abs(counts[r.peer] - count * r.weight / total) < 1 + 1e-9 for r in replicas)


@given(REPLICAS, STEPS, COUNTS)
def test_a_stage_is_routed_whatever_the_others_are_and_however_it_is_listed(
    replicas: list[Replica], step: int, count: int
) -> None:
    view = one_stage(replicas)
    if not has_share(view, step):
        return
    wider = View(7, 1, 99, (tuple(reversed(replicas)), (Replica("x"), Replica("y"))), 3, 2)
    assert routes(wider, 0, step, count) == routes(view, 0, step, count)


@settings(max_examples=40)
@given(REPLICAS, st.integers(1, 2**31), st.sampled_from([1, 3, 20]))
def test_shares_follow_the_weights_in_the_long_run(replicas: list[Replica], first_step: int, count: int) -> None:
    view, steps = one_stage(replicas), 2000 // count
    if not has_share(view, 1):
        return
    wins = Counter(peer for t in range(steps) for peer in routes(view, 0, first_step + t, count))
    total = sum(replica.weight for replica in replicas)
    for replica in replicas:
        share = replica.weight / total
        # Of several remainders each is drawn without those before: close to the weights, not exactly.
        slack = 6 * (steps * count * share * (1 - share)) ** 0.5 + 1 + (0.25 * steps if count > 1 else 0)
        assert abs(wins[replica.peer] - steps * count * share) <= slack
