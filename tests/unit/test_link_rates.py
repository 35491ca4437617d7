"""A codec may change in mid-run: frames of every rung are taken and no others; what is sent again is as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_chain import chain, microbatches, run_config

from peers.background import Background
from peers.checkpoints import Checkpoints
from peers.cli.launch import _check
from peers.compute import ComputeThread
from peers.coordinator_messages import budget_in, parse_rate, seen_message
from peers.link_rates import LinkRates
from peers.memory_transport import MemoryNetwork
from peers.peer_inbox import PeerInbox
from peers.run_budget import MOST_NOTES, RunBudget
from peers.stage_compute import ComputeParts
from peers.stage_files import StageFiles
from peers.stage_worker import StageWorker, WorkerParts
from protocol.effects import Compute
from protocol.errors import BadFrame, UserError
from protocol.events import Stalled, ViewChanged
from protocol.frame import Frame, Header, Kind
from protocol.link_measure import LinkMeasure
from protocol.model.engine import StageEngine
from protocol.model.payload import PayloadCheck, codecs, coordinates_shape, ids_bytes, rate_ladders
from protocol.peer_report import PeerReport, parse_report
from protocol.rate_controller import LOWER_STEPS
from protocol.view import Replica, View
from protocol.work import APPLY, Action

pytestmark = pytest.mark.kernels

ADAPTIVE = {"rates": "adaptive", "codec": "bfloat16", "least_codec": "int3"}
BITS = {Kind.FORWARD: (2, 24, 22, 20, 19), Kind.BACKWARD: (2, 24, 22, 20)}


def test_the_ladders_have_what_lies_between_the_two_codecs() -> None:
    ladders = rate_ladders(run_config(boundary=ADAPTIVE))
    assert {kind: tuple(rung.tag for rung in ladder) for kind, ladder in ladders.items()} == BITS
    for ladder in ladders.values():
        assert all(more.frame_bytes > fewer.frame_bytes for more, fewer in pairwise(ladder))
    fixed = rate_ladders(run_config(boundary={"codec": "int4", "gradient_codec": "int8"}))
    assert {kind: [rung.name for rung in ladder] for kind, ladder in fixed.items()} == {
        Kind.FORWARD: ["int4"], Kind.BACKWARD: ["int8"],
    }  # fmt: skip


def test_a_rung_that_saves_nothing_is_left_out() -> None:
    """Of one number a token, int8 with its scale takes the two bytes of bfloat16, and int6 in whole bytes too."""
    ladder = rate_ladders(run_config(boundary={**ADAPTIVE, "rank": 1}))[Kind.BACKWARD]
    assert [rung.name for rung in ladder] == ["bfloat16", "int4"]


def test_a_frame_may_be_of_any_rung_with_just_its_length() -> None:
    config = run_config(boundary=ADAPTIVE)
    check, run = PayloadCheck(config), codecs(config)
    for kind, tags in BITS.items():
        ids = ids_bytes(config) if kind is Kind.FORWARD else 0
        sizes = [ids + run.by_tag(tag).payload_bytes(coordinates_shape(config)) for tag in tags]
        assert check.most(kind) == sizes[0] == max(sizes)
        for tag, size in zip(tags, sizes, strict=True):
            check.check(Header(kind, size, codec=tag))
            for length in {size - 1, size + 1, *sizes} - {size}:
                with pytest.raises(BadFrame, match=f"expected {size} bytes in codec {tag}, got {length}"):
                    check.check(Header(kind, length, codec=tag))
        for tag in {0, 1, 3, 18, 19, 128 + 20, 255} - set(tags):
            with pytest.raises(BadFrame, match=f"expected a codec in .*, got {tag}"):
                check.check(Header(kind, sizes[0], codec=tag))


def test_every_rung_goes_through_the_stages() -> None:
    """Each microbatch, and each boundary of it, in other bits; with more bits closer to what it would be unrounded."""
    config = run_config(boundary=ADAPTIVE)
    exact = gradients(chain(run_config()), {}, {})
    errors = []
    for ups, down in (((2, 2), (2, 2)), ((24, 20), (22, 20)), ((19, 19), (20, 20))):
        found = gradients(chain(config), dict(enumerate(ups)), dict(enumerate(down)))
        errors.append(sum(float((found[name] - exact[name]).norm()) for name in exact))
    assert errors == sorted(errors) and 0 < errors[0] < errors[1]


def gradients(engines: list[StageEngine], up: Mapping[int, int], down: Mapping[int, int]) -> dict[str, torch.Tensor]:
    """Of one microbatch's step, in these codecs at each boundary."""
    check = PayloadCheck(engines[0].config)
    payload, codec = engines[0].forward_ids(1, 0, microbatches(1)[0], up.get(0)).payload, up.get(0)
    for index, engine in enumerate(engines[1:], start=1):
        assert payload is not None
        tag = engine.codec_tag(Kind.FORWARD) if codec is None else codec
        check.check(Header(Kind.FORWARD, len(payload), step=1, codec=tag))
        codec = up.get(index)
        payload = engine.forward(1, 0, payload, tag, codec).payload
    gradient, codec = engines[-1].backward(1, 0, None, 0, down.get(len(engines) - 2)), down.get(len(engines) - 2)
    for index in reversed(range(len(engines) - 1)):
        assert gradient is not None
        tag = engines[index].codec_tag(Kind.BACKWARD) if codec is None else codec
        check.check(Header(Kind.BACKWARD, len(gradient), step=1, codec=tag))
        codec = down.get(index - 1)
        gradient = engines[index].backward(1, 0, gradient, tag, codec)
    return {name: tensor.clone() for engine in engines for name, tensor in engine.average().items()}


class Line:
    """What a transport would measure on the links of a peer: a rate, and a step's bytes in this rung."""

    def __init__(self, rate: float) -> None:
        self.rate, self.measures = rate, {"next": LinkMeasure(), "previous": LinkMeasure()}

    def links(self) -> dict[str, LinkMeasure]:
        return self.measures

    def sent(self, peer: str, size: int) -> None:
        old = self.measures[peer]
        self.measures[peer] = LinkMeasure(0.0, self.rate, old.busy_seconds + size / self.rate, old.sent_bytes + size)


def step(rates: LinkRates, line: Line, number: int, microbatches: int = 4) -> tuple[int | None, int | None]:
    """A middle stage's step of a second; the tags of its last microbatch."""
    ladders = rates.ladders
    sizes = {rung.tag: rung.frame_bytes for ladder in ladders.values() for rung in ladder}
    up = down = None
    for microbatch in range(microbatches):
        up = rates.tag(Compute(number, Action.parse(f"F{microbatch}"), receiver="next"))
        down = rates.tag(Compute(number, Action.parse(f"B{microbatch}"), receiver="previous"))
        for peer, tag in (("next", up), ("previous", down)):
            line.sent(peer, sizes.get(tag or 0, 100))
    return up, down


def test_each_link_has_its_own_bits() -> None:
    config = run_config(boundary=ADAPTIVE)
    line = Line(1e9)
    rates = LinkRates(config, line.links)
    rates.told = 1.0
    assert step(rates, line, 1) == (2, 2)
    assert rates.step_applied(1.0, 0.9) == []
    assert rates.least_seconds == pytest.approx(0.9)
    line.rate = 4 * rates.ladders[Kind.BACKWARD][-1].frame_bytes / 0.8  # in int4 a step's gradients take 0.8 s
    changes = []
    for number in range(2, 2 + 2 * LOWER_STEPS):
        step(rates, line, number)
        changes += rates.step_applied(1.5, 0.9)
    assert {(change.peer, change.kind) for change in changes} == {
        ("next", Kind.FORWARD), ("previous", Kind.BACKWARD),
    }  # fmt: skip
    assert step(rates, line, 99) == (19, 20)


def test_a_peer_that_a_view_moves_to_the_other_side_gets_its_own_ladder() -> None:
    """int3 is for coordinates only: as a gradient it would be refused, and sent again for ever."""
    line = Line(1.0)
    rates = LinkRates(run_config(boundary=ADAPTIVE), line.links)
    rates.told = 1e-3
    for number in range(1, 2 + LOWER_STEPS):
        step(rates, line, number)
        rates.step_applied(1e9, 1e-3)
    assert rates.tag(Compute(9, Action.parse("F0"), receiver="next")) == 19
    assert rates.tag(Compute(9, Action.parse("B0"), receiver="next")) in BITS[Kind.BACKWARD]


def test_nothing_computed_is_nothing_known() -> None:
    """The coordinator would refuse a report with 0 seconds, the peer's applied steps and all."""
    rates = LinkRates(run_config(boundary=ADAPTIVE), lambda: {})
    rates.step_applied(0.0, 0.0)
    assert parse_report(PeerReport(least_seconds=rates.least_seconds, held={}).to_json(), 3).least_seconds is None


def test_a_link_that_cannot_keep_up_at_all_is_told_to_the_coordinator() -> None:
    config = run_config(boundary=ADAPTIVE)
    line = Line(4 * rate_ladders(config)[Kind.FORWARD][-1].frame_bytes / 3.0)
    rates = LinkRates(config, line.links)
    for number in range(1, 4):
        step(rates, line, number)
        assert rates.step_applied(20.0, 0.9) == [], "nothing is decided before the coordinator has told a budget"
    assert rates.least_seconds == pytest.approx(3.0)


def test_with_fixed_rates_nothing_is_measured_or_told() -> None:
    def links() -> Mapping[str, LinkMeasure]:
        raise AssertionError("asked")

    rates = LinkRates(run_config(boundary={"codec": "int4"}), links)
    assert rates.tag(Compute(1, Action.parse("F0"), receiver="next")) is None
    assert rates.step_applied(1.0, 1.0) == [] and rates.least_seconds is None
    assert "least_seconds" not in PeerReport(least_seconds=rates.least_seconds).to_json()
    assert seen_message(3, 0) == {"type": "seen", "step": 3, "epoch": 0}


def test_what_carries_no_coordinates_has_no_choice() -> None:
    moving = {**ADAPTIVE, "form": "reparam", "basis": "moving", "move_every": 2}
    rates = LinkRates(run_config(boundary=moving), lambda: {})
    assert rates.tag(Compute(2, Action.parse("B3"), receiver="previous")) is None, "the basis microbatch"
    assert rates.tag(Compute(2, Action.parse("B2"), receiver="previous")) == 2
    assert rates.tag(Compute(2, APPLY)) is None
    assert rates.tag(Compute(2, Action.parse("F0"))) is None, "the last stage's forward goes nowhere"


def test_what_the_coordinator_knows() -> None:
    view = View(1, 1, 10, ((Replica("a"),), (Replica("b"), Replica("c", weight=0))))
    budget = RunBudget()
    assert budget.of(view) is None
    budget.note("a", 2.0)
    assert budget.of(view) is None, "a coordinator that has just returned has not heard all"
    for peer, seconds in (("a", 2.0), ("b", 3.0), ("c", 9.0), ("d", 9.0), ("b", None)):
        budget.note(peer, seconds)
    assert budget.of(view) == 3.0 and budget.of(None) is None
    assert [budget.may_note("a") for _ in range(MOST_NOTES + 1)] == [True] * MOST_NOTES + [False]


@pytest.mark.parametrize("value", [None, "x", True, -1.0, 0.0, float("nan"), float("inf"), 1e9, [1]])
def test_a_budget_that_is_none_is_not_taken(value: Any) -> None:
    assert budget_in({"type": "seen", "budget": value}) is None
    assert budget_in({**seen_message(1, 0, 2.5)}) == 2.5


def test_messages_are_bounded() -> None:
    report = {**PeerReport(least_seconds=2.5, held={}).to_json()}
    assert parse_report(report, 3).least_seconds == 2.5
    for value in ("x", -1.0, 1e9):
        with pytest.raises(BadFrame, match="seconds of a step, got"):
            parse_report({**report, "least_seconds": value}, 3)
    assert parse_rate({"step": 3, "reason": "x\n" * 999}) == (3, ("x " * 999)[:500])
    with pytest.raises(BadFrame, match="expected the step after which a rate changed"):
        parse_rate({"step": -1, "reason": ""})


def test_one_process_cannot_round_as_links_did() -> None:
    with pytest.raises(UserError, match='expected --verify on a run with rates = "fixed", got "adaptive"'):
        _check(run_config(boundary=ADAPTIVE), 3, verify=True, resumed=False)
    _check(run_config(boundary=ADAPTIVE), 3, verify=False, resumed=False)


def test_what_is_sent_again_is_what_was_sent(small_run: Callable[..., Any], tmp_path: Path) -> None:
    """The bits change while a forward waits for its gradient; the link breaks, and the forward is sent again."""
    run = small_run(boundary={"codec": "bfloat16", "rates": "adaptive"}, pipeline={"stages": 3, "window": 4})
    sent: list[Frame] = []

    async def scene() -> None:
        background, compute = Background(), ComputeThread()
        checkpoints = Checkpoints(tmp_path, "isle-0123", keep=2)
        parts = WorkerParts(
            compute_parts=ComputeParts(run.config, run.tokens, checkpoints),
            transport=MemoryNetwork(1).join("peer-0"),
            compute=compute,
            files=StageFiles(run.config, checkpoints),
            background=background,
            send=lambda peer, frame: sent.append(frame),
            report=lambda report: None,
            tell=lambda message: None,
        )
        replicas = tuple(Replica(f"peer-{stage}") for stage in range(3))
        worker = StageWorker(parts, 0, replicas[0], 0, False, lambda peer: None)
        await worker.build()
        tags = [2, 24, 20, 24]
        worker.rates.tag = lambda work: tags[work.action.microbatch]  # type: ignore[method-assign]
        worker.feed(ViewChanged(View(1, 1, 10, tuple((replica,) for replica in replicas))))
        while len(sent) < 4:
            assert not background.failure.done(), background.failure.result()
            await asyncio.sleep(0.01)
        tags[:] = [22] * 4
        worker.feed(Stalled("peer-1"))
        await worker.close()
        await background.close()
        compute.close()

    asyncio.run(scene())
    first, again = sent[:4], [frame for frame in sent[4:] if frame.header.kind is Kind.FORWARD]
    assert [frame.header.codec for frame in first] == [2, 24, 20, 24]
    assert again == first
    inbox = PeerInbox(run.config)
    for frame in again:
        assert inbox.tensor("peer-0", frame, 1)
