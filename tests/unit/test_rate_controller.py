"""The controller of a link's bits, in a model of a pipeline: bits follow the rate, and rest when nothing changes."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.link_measure import LinkMeasure
from protocol.rate_controller import MOST_RAISE_STEPS, LinkUse, RateController, Rung, budget_of, uplink_seconds

MICROBATCHES = 16
LADDER = tuple(Rung(16 + bits, f"int{bits}", 1000 * bits) for bits in (8, 6, 4, 3))  # a frame has 1000 bytes a bit


@dataclass
class Link:
    """A link and its controller. `shares`: on one uplink with this other link."""

    rate: float
    controller: RateController = field(default_factory=lambda: RateController(LADDER))
    shares: Link | None = None
    measure: LinkMeasure = field(default_factory=LinkMeasure)

    @property
    def sent(self) -> float:
        return MICROBATCHES * self.controller.rung.frame_bytes

    @property
    def seconds(self) -> float:
        """What a step takes on it: until its last byte has left, behind what the other has sent by then."""
        behind = 0.0 if self.shares is None else min(self.sent, self.shares.sent)
        return (self.sent + behind) / self.rate


@dataclass
class Pipeline:
    """Peers, each with its compute seconds and links, and what the coordinator knows. Every number may be noisy."""

    compute: list[float]
    links: list[list[Link]]
    noise: float = 0.0
    seed: int = 0
    rtt: float = 0.1
    budget: float | None = None
    changes: list[tuple[int, str, str]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def _noisy(self, number: float) -> float:
        return number * self._random.uniform(1 - self.noise, 1 + self.noise)

    @property
    def step_seconds(self) -> float:
        """The slowest stage or link, and the fill: a microbatch's way through all of it, there and back."""
        links = [link for of_peer in self.links for link in of_peer]
        slowest = max([*self.compute, *(link.seconds for link in links)])
        fill = sum(self.compute) + sum(link.seconds for link in links)
        return slowest + fill / MICROBATCHES + self.rtt * len(links) / 2

    def step(self) -> None:
        seconds, least = self._noisy(self.step_seconds), []
        self.steps += 1
        for compute, links in zip(self.compute, self.links, strict=True):
            own, uses = self._noisy(compute), [self._use(link) for link in links]
            uplink = uplink_seconds(uses)
            for number, (link, use) in enumerate(zip(links, uses, strict=True)):
                found = link.controller.step(use, uplink, budget_of(self.budget, own, seconds), own)
                if found is not None:
                    self.changes.append((self.steps, f"{compute}/{number}", found.after.name))
            least.append(max([own, *(link.controller.least_seconds or 0.0 for link in links)]))
        self.budget = max(least)

    def _use(self, link: Link) -> LinkUse:
        # What hivemind's links tell: the way of the last byte counts as busy, and of a quiet link that of every one.
        gaps = max(0.0, self.step_seconds - link.seconds)
        busy = self._noisy(link.seconds) + min(MICROBATCHES * self.rtt, self.rtt + gaps)
        before = link.measure
        link.measure = LinkMeasure(
            self.rtt, self._noisy(link.rate), before.busy_seconds + busy, before.sent_bytes + int(link.sent)
        )
        return LinkUse.between(before, link.measure, MICROBATCHES)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def bits(self) -> list[list[str]]:
        return [[link.controller.rung.name for link in links] for links in self.links]


def pipeline(
    rates: list[float], compute: list[float] | None = None, shared: bool = True, noise: float = 0.0, seed: int = 0
) -> Pipeline:
    """Stages in a row, each with a line of such a rate, on which it sends forward and backward."""
    stages, links = len(rates), []
    for stage, rate in enumerate(rates):
        own = [Link(rate) for _ in range((stage > 0) + (stage + 1 < stages))]
        if shared and len(own) == 2:
            own[0].shares, own[1].shares = own[1], own[0]
        links.append(own)
    return Pipeline(compute or [1.0] * stages, links, noise, seed)


FAST = 2 * MICROBATCHES * 8000 / 0.7  # two links in int8 take 0.7 s


def test_a_link_with_room_stays_at_its_most_bits() -> None:
    run = pipeline([FAST] * 4)
    run.run(50)
    assert run.bits() == [["int8"], ["int8", "int8"], ["int8", "int8"], ["int8"]]
    assert not run.changes


def test_halving_one_rate_lowers_its_bits_and_keeps_the_step_and_restoring_raises_them() -> None:
    run = pipeline([FAST] * 4)
    run.run(10)
    before = run.step_seconds
    for link in run.links[1]:
        link.rate = FAST / 2
    assert run.step_seconds > 1.2 * before, "without a controller the step would be much longer"
    run.run(5)
    assert run.bits()[1] == ["int4", "int4"]
    assert run.bits()[0] + run.bits()[2] + run.bits()[3] == ["int8"] * 4, "others have no reason to change"
    assert run.step_seconds < 1.2 * before
    for link in run.links[1]:
        link.rate = FAST
    run.run(15)
    assert run.bits()[1] == ["int8", "int8"]
    assert run.step_seconds == pytest.approx(before)


def test_halving_all_rates() -> None:
    run = pipeline([FAST] * 4)
    run.run(10)
    before = run.step_seconds
    for link in (link for links in run.links for link in links):
        link.rate /= 2
    run.run(10)
    assert run.step_seconds < 1.2 * before
    assert [bits for peer in run.bits()[1:3] for bits in peer] == ["int4"] * 4
    assert [peer[0] for peer in (run.bits()[0], run.bits()[3])] == ["int8"] * 2, "ends have an uplink for themselves"


def test_a_bottleneck_that_no_bits_can_lift_leaves_the_others_their_bits() -> None:
    """One home is so slow that it holds up all even at the fewest bits: nobody else gains by saving bytes."""
    slow = 2 * MICROBATCHES * 3000 / 4.0
    run = pipeline([FAST / 3, slow, FAST / 3, FAST / 3])
    run.run(40)
    assert run.bits() == [["int8"], ["int3", "int3"], ["int8", "int8"], ["int8"]]


def test_compute_elsewhere_gives_a_link_its_room() -> None:
    """The budget is that of the slowest stage, not one's own."""
    run = pipeline([FAST / 3] * 4, compute=[0.1, 0.1, 0.1, 3.0])
    run.run(40)
    assert run.bits() == [["int8"], ["int8", "int8"], ["int8", "int8"], ["int8"]]


def test_links_that_do_not_share_an_uplink_are_not_taken_to() -> None:
    """Each takes 0.9 of the step by itself: together they would be too much for one uplink.

    Round trips that are long beside what is sent would hide the difference: then it errs to fewer bits.
    """
    run = pipeline([MICROBATCHES * 8000 / 0.9] * 4, shared=False)
    run.rtt = 0.005
    run.run(30)
    assert not run.changes


rates = st.lists(st.floats(0.05, 10), min_size=4, max_size=4).map(lambda factors: [FAST * f for f in factors])
computes = st.lists(st.floats(0.2, 3), min_size=4, max_size=4)


@given(rates, computes, st.booleans())
def test_it_comes_to_rest_with_steady_inputs(rates: list[float], compute: list[float], shared: bool) -> None:
    run = pipeline(rates, compute, shared)
    run.run(60)
    settled = len(run.changes)
    run.run(200)
    assert len(run.changes) == settled, run.changes
    least = max([*compute, *(MICROBATCHES * 3000 / rate for rate in rates)])
    for link in (link for links in run.links for link in links):
        at_the_floor = link.controller.rung is LADDER[-1]
        together = link.seconds + (link.shares.seconds if link.shares else 0.0)
        assert at_the_floor or link.seconds <= 1.06 * least or together <= 1.06 * least, "it holds up the step"


@given(rates, computes, st.booleans(), st.integers(0, 1 << 20))
def test_noise_does_not_make_it_swing(rates: list[float], compute: list[float], shared: bool, seed: int) -> None:
    """+-10 % on every number. A link on the edge may move once; it does not go to and fro."""
    run = pipeline(rates, compute, shared, noise=0.1, seed=seed)
    run.run(60)
    settled = len(run.changes)
    run.run(200)
    late = [name for _, name, _ in run.changes[settled:]]
    assert all(late.count(name) <= 2 for name in set(late)), run.changes[settled:]


def measured(seconds: float, rate: float = 1e6) -> LinkUse:
    """A step in which the link was busy for so long."""
    return LinkUse(MICROBATCHES, int(seconds * rate), seconds, 0.0, rate)


def with_seconds(controller: RateController, seconds_in_int8: float) -> LinkUse:
    """The use of a link on which a step in int8 would take so long."""
    seconds = seconds_in_int8 * controller.rung.frame_bytes / LADDER[0].frame_bytes
    return LinkUse(MICROBATCHES, MICROBATCHES * controller.rung.frame_bytes, seconds, 0.0,
                   MICROBATCHES * LADDER[0].frame_bytes / seconds_in_int8)  # fmt: skip


def feed(controller: RateController, seconds_in_int8: float, budget: float | None = 1.0) -> str | None:
    use = with_seconds(controller, seconds_in_int8)
    decision = controller.step(use, use.sending_seconds, budget, 0.9)
    return None if decision is None else decision.after.name


def test_it_waits_before_it_moves_and_goes_down_at_once_and_up_by_rungs() -> None:
    controller = RateController(LADDER)
    assert [feed(controller, 2.5) for _ in range(3)] == [None, None, "int3"]
    assert [feed(controller, 0.5) for _ in range(5)] == [None, None, None, None, "int4"]
    assert [feed(controller, 0.5) for _ in range(10)] == [None] * 4 + ["int6"] + [None] * 4 + ["int8"]


def test_a_rise_that_is_undone_makes_the_next_one_wait_longer() -> None:
    controller = RateController(LADDER)
    waits, steps = [], 0
    for _ in range(600):
        steps += 1
        # A link that is slower just when it is used more: it seems to have room at every rung but the first.
        name = feed(controller, 2.0 if controller.rung is LADDER[0] else 0.5)
        if name == "int8":
            waits.append(steps)
        if name is not None:
            steps = 0
    assert waits[0] == 5 and waits[-1] == MOST_RAISE_STEPS and waits == sorted(waits), waits


def test_nothing_is_decided_without_a_budget_a_bandwidth_or_traffic() -> None:
    controller = RateController(LADDER)
    assert all(feed(controller, 9.0, budget=None) is None for _ in range(9))
    for use in (
        dataclasses.replace(measured(9.0), bytes_per_second=None),
        dataclasses.replace(measured(9.0), microbatches=0),
        dataclasses.replace(measured(9.0), sent_bytes=0),
    ):
        controller = RateController(LADDER)
        assert all(controller.step(use, 9.0, 1.0, 1.0) is None for _ in range(9)), use
    assert RateController(LADDER).least_seconds is None


def test_a_ladder_of_one_rung_never_moves() -> None:
    controller = RateController(LADDER[:1])
    assert all(feed(controller, seconds) is None for seconds in [9.0] * 9 + [0.01] * 9)


def test_the_reason_has_the_numbers() -> None:
    controller = RateController(LADDER)
    use = with_seconds(controller, 2.0)
    decisions = [controller.step(use, use.sending_seconds, 1.2, 0.9) for _ in range(3)]
    assert decisions[-1] is not None
    assert decisions[-1].reason == (
        "int8 -> int4: the link holds up the step: 16 microbatches take 2 s at 0.512 Mbit/s, and 1 s in int4; a step "
        "takes 1.2 s in any case (own compute 0.9 s), for which int8 needs 0.853 Mbit/s"
    )


def test_what_happened_between_two_measures() -> None:
    before, after = LinkMeasure(0.1, 5.0, 10.0, 100), LinkMeasure(0.2, 6.0, 12.0, 130)
    assert LinkUse.between(before, after, 3) == LinkUse(3, 30, 2.0, 0.2, 6.0)
    opened_anew = LinkMeasure(0.2, 6.0, 1.5, 20)
    assert LinkUse.between(before, opened_anew, 3) == LinkUse(3, 20, 1.5, 0.2, 6.0)


def test_links_on_one_uplink_take_what_the_faster_of_them_says() -> None:
    slow, fast, unknown = (LinkUse(1, 100, 1.0, 0.0, rate) for rate in (10.0, 50.0, None))
    assert uplink_seconds([slow, fast, unknown]) == 200 / 50
    assert uplink_seconds([unknown]) == uplink_seconds([]) == 0.0


def test_the_budget_is_the_runs_within_what_a_step_took() -> None:
    assert budget_of(None, 1.0, 5.0) is None
    assert budget_of(2.0, 1.0, 5.0) == 2.0
    assert budget_of(0.5, 1.0, 5.0) == 1.0
    assert budget_of(1e6, 1.0, 5.0) == 5.0
