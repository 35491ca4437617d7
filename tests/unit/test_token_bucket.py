"""A token bucket: a burst at once, a rate in the long run."""

import pytest

from protocol.token_bucket import TokenBucket


def test_a_full_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=0.5, burst=3)
    assert [bucket.take(10.0) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(10.0) == pytest.approx(2.0)
    assert bucket.take(11.0) == pytest.approx(1.0), "asking takes nothing"
    assert bucket.take(12.0) == 0.0


def test_it_never_holds_more_than_its_burst_and_time_does_not_run_backwards() -> None:
    bucket = TokenBucket(rate=1.0, burst=2)
    assert [bucket.take(now) for now in (1000.0, 1000.0)] == [0, 0]
    assert bucket.take(5.0) == 1.0
    assert [bucket.take(2000.0) for _ in range(3)] == [0, 0, 1.0]


def test_more_than_the_burst_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = TokenBucket(rate=1.0, burst=2)
    assert bucket.take(0.0, 5) == 0.0
    assert bucket.take(0.0) == 4.0
