"""Steps whose numbers are not finite: passed over, as often as the run allows it, instead of ending the run. Pure.

Who cannot do step t stands still and says so. Its microbatches go to the others of its stage, who may find the same;
when the last one has, the run goes back, as when a stage has lost its last peer, to the newest step that all
stages have in files, by a view of a new epoch that names t among the steps to pass over (`View.skipped`). What lies
between is trained again, to the same bits; at t every stage goes on without microbatches and without an update, while
the count of steps, and with it the learning rate's schedule, goes on. A step that is passed over once always is.
"""

from __future__ import annotations

from protocol.membership_events import Failed
from protocol.run_state import RunState


def is_settled(run: RunState, event: Failed) -> bool:
    """Whether what `event` tells of a step is of before that step was passed over."""
    if not event.step or not run.terms.skip_nonfinite:
        return False
    return run.view is None or event.epoch < run.view.epoch or event.step in run.skipped


def may_pass_over(run: RunState, event: Failed) -> bool:
    """Whether the step of `event` may be passed over: it is one that is to be done, and the run still may."""
    view = run.view
    if view is None or len(run.skipped) >= run.terms.skip_nonfinite or event.epoch != view.epoch:
        return False
    return view.restored < event.step <= view.last_step


def pass_over(run: RunState, stage: int, event: Failed) -> None:
    """Pass over the step of `event`, which nobody of `stage` can do: the run goes back to before it."""
    run.skipped = tuple(sorted({*run.skipped, event.step}))
    run.reached = min(run.reached, event.step - 1)  # whoever has applied it has to do without
    count = f"{len(run.skipped)} of at most {run.terms.skip_nonfinite}"
    run.dead.setdefault(stage, f"step {event.step} is passed over ({count}): stage {stage}: {event.reason}")
