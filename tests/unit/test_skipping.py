"""Steps that are passed over: when the coordinator lets them be, and what it means for what is kept and asked."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_story import Story
from simulated_swarm.scenario import Scenario
from simulated_swarm.swarm import Swarm

from protocol.membership import Failed, Phase
from protocol.place import Place, Rules
from protocol.view import Replica, View


def story(**terms: Any) -> Story:
    told = Story(2, checkpoint_every=10, skip_nonfinite=2, **terms)
    told.join("ann", "ben")
    told.steps(24)
    return told


def not_finite(peer: str, step: int, epoch: int = 0) -> Failed:
    return Failed(peer, f"a number of step {step} is not finite", True, epoch, step)


def test_the_run_goes_back_and_passes_over_the_step() -> None:
    told = story()
    told.feed(not_finite("ben", 25))
    view = told.membership.view
    assert view is not None and told.membership.phase is Phase.RUNNING
    assert (view.epoch, view.restored, view.skipped) == (1, 20, (25,))
    told.feed(not_finite("ann", 25), not_finite("ben", 25))
    assert told.membership.view == view, "what was said by the view before is settled"
    told.steps(30)
    told.reload()
    told.beat(2)
    assert told.membership.view is not None and told.membership.view.skipped == (25,)


def test_the_next_step_that_is_not_finite_is_passed_over_as_well_and_then_no_more() -> None:
    told = story()
    told.feed(not_finite("ben", 25))
    told.feed(not_finite("ben", 26, 1))
    assert told.membership.view is not None and told.membership.view.skipped == (25, 26)
    told.feed(not_finite("ben", 27, 2))
    assert told.end is not None and told.end.failed and "step 27" in told.end.reason


@pytest.mark.parametrize("step", [20, 0, 5000])
def test_only_a_step_that_is_to_be_done_is_passed_over(step: int) -> None:
    told = story()
    told.feed(not_finite("ben", 25))
    told.feed(not_finite("ben", step, 1))
    assert told.end is not None and told.end.failed


def test_where_others_of_its_stage_can_do_the_step_it_is_done() -> None:
    """One replica's machine, or a lie: it costs that one its place, and the run no step."""
    told = Story(2, checkpoint_every=10, skip_nonfinite=2)
    told.join("ann", "ben", "cat", "dan")
    told.steps(24)
    view = told.membership.view
    assert view is not None
    one, other = view.group(1, 25)
    told.feed(not_finite(one, 25))
    view = told.membership.view
    assert view is not None and view.skipped == () and view.group(1, 25) == (other,) and one in told.membership.members
    told.feed(not_finite(one, 25))
    assert told.membership.view == view, "it is told again and again"
    told.feed(not_finite(other, 25))
    assert told.membership.view is not None and told.membership.view.skipped == (25,)


def test_a_run_that_passes_over_nothing_ends() -> None:
    told = Story(2, checkpoint_every=10)
    told.join("ann", "ben")
    told.steps(24)
    told.feed(not_finite("ben", 25))
    assert told.end is not None and told.end.failed


def place(applied: int, skipped: tuple[int, ...]) -> Place:
    view = View(1, 1, 99, ((Replica("a"),),), skipped=skipped)
    return Place("a", Rules(lambda _: 4, 2, lambda _: 8, lambda _: 0), applied, 0, view)


def test_a_step_that_is_passed_over_has_no_microbatches() -> None:
    here = place(5, (6,))
    assert (here.routed(6), here.routed(7)) == ([], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("applied", "skipped", "one", "two"),
    [(9, (), 9, 8), (9, (9,), 8, 7), (9, (8, 9), 7, 6), (9, (8,), 9, 7), (0, (1,), 0, -1)],
)
def test_what_is_kept_is_counted_in_steps_that_were_done(
    applied: int, skipped: tuple[int, ...], one: int, two: int
) -> None:
    """Who passes over a step needs nobody, so that it tells nothing of how far the others are."""
    here = place(applied, skipped)
    assert (here.worked(1), here.worked(2)) == (one, two)


def test_others_may_be_ahead_by_the_steps_that_they_passed_over() -> None:
    assert place(5, (6, 7)).ahead(9) == 2 and place(5, ()).ahead(9) == 4


@pytest.mark.parametrize("seed", [85, 97])
def test_nothing_is_forgotten_too_early_where_several_steps_are_passed_over(seed: int) -> None:
    """A seed that ran for ever while skipped steps counted like others."""
    scenario = Scenario.drawn(seed)
    assert len(scenario.run.skipped) > 1
    Swarm(scenario).run()
