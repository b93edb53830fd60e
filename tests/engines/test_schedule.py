"""Which job goes to which lane, and the course of a round: every job once, no gaps, no overlap."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.training.engines.schedule import assign, segments
from fedup.training.local import Job, LocalTraining

many = settings(max_examples=150, deadline=None, derandomize=True)
step_counts = st.lists(st.integers(1, 30), max_size=25) | st.lists(st.integers(1, 3), max_size=25)
lane_counts = st.integers(1, 9)


def make_jobs(steps):
    jobs = [Job(i, torch.arange(2 * n), LocalTraining(batch_size=2), seed=i) for i, n in enumerate(steps)]
    assert [job.steps for job in jobs] == steps
    return jobs


def length(lane):
    return sum(job.steps for job in lane)


@dataclass
class Ran:
    """When a job ran, and where."""

    job: Job
    lane: int
    begin: int
    end: int


def follow(course):
    """All that ran, in the order in which it ended."""
    now, running, ran = 0, {}, []
    for stretch in course:
        for lane, job in stretch.begin:
            assert lane not in running  # it is free
            running[lane] = Ran(job, lane, now, now)
        assert sorted(running) == list(range(stretch.slots))  # lanes with work are the first ones
        assert stretch.steps >= 1
        now += stretch.steps
        for lane, job in stretch.end:
            done = running.pop(lane)
            assert done.job is job
            done.end = now
            ran.append(done)
        assert all(each.job.steps > now - each.begin for each in running.values())  # what has ended is said to
    assert not running
    return ran


@many
@given(step_counts, lane_counts)
def test_every_job_goes_to_one_lane(steps, lanes):
    jobs = make_jobs(steps)
    found = assign(jobs, lanes)
    assert len(found) == min(lanes, len(jobs))
    assert all(found)
    assert sorted(job.client for lane in found for job in lane) == list(range(len(jobs)))


@many
@given(step_counts, lane_counts)
def test_every_job_runs_once_for_as_long_as_it_has_steps(steps, lanes):
    jobs = make_jobs(steps)
    ran = follow(segments(assign(jobs, lanes)))
    assert sorted(each.job.client for each in ran) == list(range(len(jobs)))
    assert all(each.end - each.begin == each.job.steps for each in ran)


@many
@given(step_counts, lane_counts)
def test_a_lane_does_its_jobs_one_after_another_without_a_gap(steps, lanes):
    found = assign(make_jobs(steps), lanes)
    ran = follow(segments(found))
    for place, lane in enumerate(found):
        here = [each for each in ran if each.lane == place]
        assert [each.job for each in here] == lane
        assert [each.begin for each in here] == [0, *(each.end for each in here[:-1])]


@many
@given(step_counts, lane_counts)
def test_a_round_lasts_as_long_as_its_longest_lane_which_is_the_first(steps, lanes):
    found = assign(make_jobs(steps), lanes)
    lengths = [length(lane) for lane in found]
    assert sum(stretch.steps for stretch in segments(found)) == max(lengths, default=0)
    assert lengths == sorted(lengths, reverse=True)


@many
@given(step_counts, lane_counts)
def test_no_lane_works_longer_than_its_share_and_one_job(steps, lanes):
    found = assign(make_jobs(steps), lanes)
    assert max(map(length, found), default=0) <= sum(steps) / lanes + max(steps, default=0)


@many
@given(step_counts, lane_counts)
def test_a_job_waits_only_while_all_lanes_are_busy_with_longer_ones(steps, lanes):
    ran = follow(segments(assign(make_jobs(steps), lanes)))
    free = {lane: max(each.end for each in ran if each.lane == lane) for lane in {each.lane for each in ran}}
    for each in ran:
        assert each.begin <= min(free.values())
        assert all(other.job.steps >= each.job.steps for other in ran if other.begin < each.begin)


@many
@given(step_counts, lane_counts, st.randoms(use_true_random=False))
def test_the_order_in_which_jobs_are_given_makes_no_difference(steps, lanes, random):
    jobs = make_jobs(steps)
    found = assign(jobs, lanes)
    random.shuffle(jobs)
    assert assign(jobs, lanes) == found


@given(step_counts)
@many
def test_one_lane_does_all_jobs_in_turn(steps):
    (lane,) = assign(make_jobs(steps), 1) or [[]]
    assert [job.steps for job in lane] == sorted(steps, reverse=True)
    course = list(segments([lane]))
    assert [stretch.steps for stretch in course] == sorted(steps, reverse=True)
    assert all(stretch.begin == stretch.end == ((0, job),) for stretch, job in zip(course, lane, strict=True))


@pytest.mark.parametrize("lanes", [1, 8])
def test_no_jobs_take_no_lane_and_no_time(lanes):
    assert assign([], lanes) == []
    assert list(segments([])) == []


def test_as_many_lanes_as_jobs_begin_together_and_drop_out_one_by_one():
    course = list(segments(assign(make_jobs([3, 7, 5]), 8)))
    assert [stretch.slots for stretch in course] == [3, 2, 1]
    assert [stretch.steps for stretch in course] == [3, 2, 2]
    assert [[job.client for _, job in stretch.begin] for stretch in course] == [[1, 2, 0], [], []]
    assert [[job.client for _, job in stretch.end] for stretch in course] == [[0], [2], [1]]
