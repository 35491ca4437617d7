"""A member that lies costs itself its place: false failures, accusations and differences, wrong states, empty files."""

from __future__ import annotations

import pytest
from coordinator_story import Story

from protocol.blame import SECOND_WORD_SECONDS
from protocol.conduct import MOST_ALARMS, MOST_UNPROVOKED
from protocol.membership import (
    Accused,
    Admit,
    Differs,
    Effect,
    Failed,
    Heard,
    Irreplaceable,
    LostTrack,
    Phase,
    TurnAway,
)
from protocol.quarrels import MOST_TIMES, Quarrels
from protocol.roster import MOST_AHEAD


def story(*peers: str, stages: int = 2, **terms: object) -> Story:
    """A run that goes on, with `peers` that all work."""
    told = Story(stages, **terms)  # type: ignore[arg-type]
    told.join(*peers)
    if len(peers) > stages:
        told.steps(8)
        told.steps(8)
    return told


def turned_away(effects: list[Effect]) -> list[str]:
    return [effect.peer for effect in effects if isinstance(effect, TurnAway)]


# Failures


def test_a_newcomer_without_a_state_cannot_end_the_run() -> None:
    told = story("ann", "ben")
    told.join("cat")
    told.feed(Failed("cat", "the loss is not finite", fatal=True))
    assert told.end is None and told.membership.phase is Phase.RUNNING
    assert told.seats() == {0: ["ann"], 1: ["ben"]} and "cat" not in told.membership.members


def test_one_of_several_replicas_cannot_end_the_run_and_may_come_back() -> None:
    told = story("ann", "ben", "cat")
    told.feed(Failed("cat", "the loss is not finite", fatal=True))
    assert told.end is None and told.seats() == {0: ["ann"], 1: ["ben"]}
    assert told.join("cat")[0] == Admit("cat")


def test_what_all_replicas_of_a_stage_say_of_a_step_ends_the_run_at_once() -> None:
    """Honest divergence: the second one does the first one's microbatches, and finds the same."""
    told = story("ann", "ben", "cat")
    told.feed(Failed("cat", "the loss is not finite", fatal=True))
    told.feed(Failed("ann", "the loss is not finite", fatal=True))
    assert told.end is not None and told.end.failed
    assert told.end.reason == "stage 0 cannot go on: peer ann: the loss is not finite"


def test_what_one_says_of_one_step_and_another_of_a_later_one_does_not_end_the_run() -> None:
    told = story("ann", "ben", "cat", "dan")
    first, second = told.seats()[0]
    told.feed(Failed(second, "the loss is not finite", fatal=True))
    told.steps(5)
    told.feed(Failed(first, "the loss is not finite", fatal=True))
    assert told.end is None


def test_what_is_said_again_by_another_after_the_run_was_set_back_ends_it() -> None:
    told = story("ann", "ben", "cat")
    told.feed(Failed("ben", "the loss is not finite", fatal=True))
    view = told.membership.view
    assert told.end is None and view is not None and view.epoch == 1
    told.steps(16)
    (successor,) = told.seats()[1]
    told.feed(Failed(successor, "the loss is not finite", fatal=True))
    assert told.end is not None and told.end.reason.startswith(f"stage 1 cannot go on: peer {successor}")


def test_who_raises_the_alarm_again_and_again_is_turned_away() -> None:
    told = story("ann", "ben", "cat")
    for number in range(MOST_ALARMS):
        effects = told.feed(Failed("cat", "the loss is not finite", fatal=True))
        assert turned_away(effects) == (["cat"] if number == MOST_ALARMS - 1 else [])
        told.restart("cat")
        told.steps(40)
    assert told.end is None


# Accusations


def test_a_newcomer_that_accuses_removes_nobody() -> None:
    told = story("ann", "ben")
    told.join("cat")
    for accused in ("ann", "ben"):
        assert told.feed(Accused("cat", accused, "noise"), Accused("cat", accused, "no state", state=True)) == []
    assert told.seats() == {0: ["ann", "cat"], 1: ["ben"]}


def test_one_word_bars_nobody_and_the_two_are_kept_apart() -> None:
    told = story("ann", "ben", "cat", "dan")
    stages = told.seats()
    effects = told.feed(Accused(stages[0][1], stages[1][1], "noise"))
    assert turned_away(effects) == []
    (gone,) = {"ann", "ben", "cat", "dan"} - told.membership.members.keys()
    assert gone == max(stages[0][1], stages[1][1], key=["ann", "ben", "cat", "dan"].index), "the one that came later"
    told.join(gone)
    told.steps(40)
    assert gone in told.membership.members and told.membership.members[gone].stage is None, "both stages are beside"


def test_who_is_kept_apart_serves_where_the_run_needs_it() -> None:
    told = story("ann", "ben", "cat")
    told.feed(Accused("ben", "cat", "noise"))
    told.join("cat")
    told.steps(20)
    told.kill("ann")
    told.beat(80)
    assert told.membership.phase is Phase.RUNNING and told.membership.members["cat"].stage is not None


def test_who_is_known_to_be_wrong_harms_nobody_by_a_further_word() -> None:
    quarrels = Quarrels()
    for accused in ("ann", "ben", "cat"):
        quarrels.note("liar", accused)
    assert quarrels.wrong("liar", "ben") == "liar"
    assert quarrels.apart("ann") == set(), "whom it accused need not be kept from it any more"
    quarrels.note("other", "ann")
    assert quarrels.wrong("other", "ann") == "", "nor does its word count against anybody"
    again = Quarrels.from_json(quarrels.to_json())
    assert again.to_json() == quarrels.to_json() and again.wrong("liar", "dan") == "liar"


def test_two_that_meet_again_and_again_do_so_a_few_times_only() -> None:
    told = story("ann", "ben")
    barred: list[str] = []
    for _ in range(2 * MOST_TIMES):
        told.join("ann", "ben")
        told.beat(4)
        barred += turned_away(told.feed(Accused("ann", "ben", "noise")))
    assert len(set(barred)) >= 1 and told.membership.waiting[0], "nobody is left for a stage, and that is said"


# Unlike weights


def test_of_three_one_word_alone_is_an_accusation() -> None:
    told = story("ann", "ben", "cat", "dan", stages=1)
    told.steps(20)
    told.feed(Differs("dan", 30, {"ann": "x", "ben": "y", "cat": "x", "dan": "x"}))
    assert told.shares(0)["ben"] == 1, "ben itself saw nothing of it"
    effects = told.beat(SECOND_WORD_SECONDS + 2)
    assert turned_away(effects) == [] and len(told.shares(0)) == 3


def test_a_second_word_is_enough() -> None:
    told = story("ann", "ben", "cat", "dan", stages=1)
    told.steps(20)
    hashes = {"ann": "x", "ben": "y", "cat": "x", "dan": "x"}
    told.feed(Differs("dan", 30, hashes))
    told.feed(Differs("ann", 30, hashes))
    assert told.shares(0)["ben"] == 0


def test_what_all_had_reported_of_the_step_before_decides_between_two() -> None:
    told = story("ann", "ben", "cat")
    first, second = told.seats()[0]
    step = told.membership.applied_everywhere
    hashes = {first: "flipped", second: f"0-{step}"}
    told.feed(Differs(first, step + 1, hashes))
    assert (told.shares(0)[first], told.shares(0)[second]) == (0, 1), "not the first in the view, as of old"


# Going back


def test_a_step_that_nothing_can_have_torn_sends_the_run_back_seldom() -> None:
    told = story("ann", "ben", "cat", checkpoint_every=4)
    told.steps(200)
    for number in range(MOST_UNPROVOKED):
        view = told.membership.view
        assert view is not None
        effects = told.feed(Irreplaceable("ben", view.epoch, told.membership.applied_everywhere, "gone"))
        assert turned_away(effects) == (["ben"] if number == MOST_UNPROVOKED - 1 else [])
        told.steps(200)


def test_who_cannot_get_a_copy_makes_it_count_no_more() -> None:
    """A file that somebody claims and does not hand out would send the run back to it again and again."""
    told = story("ann", "ben", "cat", checkpoint_every=4)
    told.copies = False
    told.steps(10)
    for name in ("ann", "ben"):
        told.peers[name].held = {s: [8] for s in range(2)} if name == "ann" else {}
        told.report(name)
    told.peers["cat"].held = {s: list(range(1, 10)) for s in range(2)}
    told.report("cat")
    told.feed(Failed("ben", "its disk broke"))
    told.peers["ben"].alive = False
    told.beat(14)
    view = told.membership.view
    assert view is not None and view.epoch == 1 and view.restored == 9
    step, stage_of = view.restored, view.stage_of
    asker = next(p for p in told.membership.members if stage_of(p) == 1)
    told.feed(LostTrack(asker, "nobody has it"))
    view = told.membership.view
    assert view is not None and (step, view.restored, view.epoch) == (9, 8, 2)


def test_a_view_of_a_restore_tells_the_weights_that_all_had() -> None:
    told = story("ann", "ben", "cat", checkpoint_every=4)
    told.steps(10)
    told.feed(Failed("ben", "its disk broke"))
    view = told.membership.view
    assert view is not None and view.epoch == 1 and view.restored > 0
    assert view.restored_hashes == tuple(f"{stage}-{view.restored}" for stage in range(2))
    assert view.hash_of(0, view.restored + 1) == "" and view.hash_of(1, view.restored) == f"1-{view.restored}"


# Reports


@pytest.mark.parametrize("claimed", [50, 1000, 10**6])
def test_nobody_is_believed_to_be_far_ahead_of_all_others(claimed: int) -> None:
    told = story("ann", "ben", "cat")
    step = told.membership.applied_everywhere
    told.feed(Heard("cat", told.account("cat", applied=claimed)))
    assert told.membership.members["cat"].step <= step + MOST_AHEAD
    for name in ("ann", "ben"):
        told.kill(name)
    told.beat(120)
    assert told.end is None, "whoever is left does not end the run by having done it all"
