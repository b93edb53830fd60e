"""Which job goes to which lane, and the course of a round: every job once, no gaps, no overlap."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.training.engines.schedule import assign, segments
from fedup.training.local import Job, LocalTraining

many = settings(max_examples=50, deadline=None, derandomize=True)
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
    for segment in course:
        for lane, job in segment.begin:
            assert lane not in running  # it is free
            running[lane] = Ran(job, lane, now, now)
        assert sorted(running) == list(range(segment.slots))  # lanes with work are the first ones
        assert segment.steps >= 1
        now += segment.steps
        for lane, job in segment.end:
            done = running.pop(lane)
            assert done.job is job
            done.end = now
            ran.append(done)
        assert all(each.job.steps > now - each.begin for each in running.values())  # what has ended is said to
    assert not running
    return ran


@many
@given(step_counts, lane_counts)
def test_every_job_runs_once_in_one_lane_without_a_gap(steps, lanes):
    jobs = make_jobs(steps)
    lists = assign(jobs, lanes)
    assert len(lists) == min(lanes, len(jobs)) and all(lists)
    assert sorted(job.client for lane in lists for job in lane) == list(range(len(jobs)))
    ran = follow(segments(lists))
    assert len(ran) == len(jobs)
    assert all(each.end - each.begin == each.job.steps for each in ran)
    for number, lane in enumerate(lists):
        here = [each for each in ran if each.lane == number]
        assert [each.job for each in here] == lane
        assert [each.begin for each in here] == [0, *(each.end for each in here[:-1])]


@many
@given(step_counts, lane_counts)
def test_a_round_lasts_as_long_as_its_longest_lane_which_is_the_first_and_has_its_share_and_one_job(steps, lanes):
    lists = assign(make_jobs(steps), lanes)
    lengths = [length(lane) for lane in lists]
    assert sum(segment.steps for segment in segments(lists)) == max(lengths, default=0)
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths, default=0) <= sum(steps) / lanes + max(steps, default=0)


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
    lists = assign(jobs, lanes)
    random.shuffle(jobs)
    assert assign(jobs, lanes) == lists


def test_as_many_lanes_as_jobs_begin_together_and_drop_out_one_by_one():
    course = list(segments(assign(make_jobs([3, 7, 5]), 8)))
    assert [segment.slots for segment in course] == [3, 2, 1]
    assert [segment.steps for segment in course] == [3, 2, 2]
    assert [[job.client for _, job in segment.begin] for segment in course] == [[1, 2, 0], [], []]
    assert [[job.client for _, job in segment.end] for segment in course] == [[0], [2], [1]]
    assert assign([], 8) == list(segments([])) == []
