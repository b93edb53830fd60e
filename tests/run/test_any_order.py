"""The filter is a function of the set of requests in force, whatever the way to that set was."""

import json
import random

import pytest
from tests.cli._in_process import contents, copy_of, fedup, filter_file, ok, sample_ids, sha256

STEPS = ("--steps", "10", "--force")


def pool() -> list[tuple[str, ...]]:
    """Requests as options: clients, classes, samples, and mixtures."""
    ids = {client: sample_ids(client) for client in range(4)}
    clients = [("--client", "0"), ("--client", "3")]
    classes = [("--class", str(label)) for label in (1, 4, 7, 9)]
    samples = [
        ("--samples", f"1:{ids[1][0]},{ids[1][1]}"),
        ("--samples", f"1:{ids[1][1]},{ids[1][20]},{ids[1][30]}"),  # shares a sample with the one above
        ("--samples", f"2:{','.join(map(str, ids[2][:12]))}"),  # a whole cell and more
        ("--samples", f"3:{ids[3][5]}", "--samples", f"2:{ids[2][40]}"),
    ]
    mixtures = [
        ("--class", "2", "--samples", f"0:{ids[0][0]},{ids[0][30]}"),
        ("--client", "0", "--class", "5"),
        ("--client", "3", "--samples", f"2:{ids[2][41]}", "--class", "8"),
    ]
    return [*clients, *classes, *samples, *mixtures]


def at_once(place, requests) -> str:
    """The filter of a fresh copy to which all requests come in one file."""
    run = copy_of("collected", place)
    rows = ["reference,client,class,sample"]
    for number, options in enumerate(requests):
        for name, value in zip(options[::2], options[1::2], strict=True):
            client, _, ids = value.partition(":")
            cells = {
                "--client": (value, "", ""),
                "--class": ("", value, ""),
                "--samples": (client, "", ids.replace(",", " ")),
            }[name]
            rows.append(",".join((str(number), *cells)))
    path = place.parent / f"{place.name}.csv"
    path.write_text("\n".join(rows))
    ok("unlearn", "--run", run, "--csv", path, *STEPS)
    return sha256(filter_file(run))


def test_fifty_requests_restorations_and_purges_end_in_the_filter_of_the_final_set(tmp_path):
    run, choose = copy_of("collected", tmp_path), random.Random(20)
    requests, in_force = pool(), {}
    done = {"unlearn": 0, "restore": 0, "purge": 0}
    for turn in range(50):
        free = [options for options in requests if options not in in_force.values()]
        weights = (6 if free else 0, 4 if len(in_force) > 1 else 0, 2 if in_force else 0)
        (what,) = choose.choices(("unlearn", "restore", "purge"), weights)
        if what == "unlearn":
            options = choose.choice(free)
            sealed = choose.choice(((), ("--keep-sealed",)))
            (one,) = ok("unlearn", "--run", run, *options, *sealed, *STEPS, "--json").json["requests"]
            in_force[one["id"]] = options
        elif what == "restore":
            back = choose.sample(sorted(in_force), choose.randint(1, min(3, len(in_force) - 1)))
            answer = ok("restore", "--run", run, *back, "--force", "--json").json
            for name in back:
                del in_force[name]
            assert answer["remaining"] == sorted(in_force, key=lambda name: int(name[1:]))
        else:
            ok("purge", "--yes", "--run", run, "--yes")
        done[what] += 1
        if turn in (15, 30, 49):
            assert sha256(filter_file(run)) == at_once(tmp_path / f"fresh{turn}", list(in_force.values())), turn
    assert min(done.values()) >= 5, done
    assert ok("verify", "--run", run, "--json").json["ok"] is True
    # And all the way back: the original model, from a folder without a filter.
    ok("restore", "--run", run, "--all")
    assert filter_file(run) is None
    assert ok("verify", "--run", run, "--json").json["ok"] is True


def test_the_order_of_a_file_does_not_matter(tmp_path):
    requests = pool()[1:9]
    assert at_once(tmp_path / "a", requests) == at_once(tmp_path / "b", requests[::-1])


def test_a_filter_does_not_depend_on_what_was_asked_and_taken_back_before(tmp_path):
    ids = sample_ids(1)
    direct, detour = copy_of("collected", tmp_path / "direct"), copy_of("collected", tmp_path / "detour")
    ok("unlearn", "--run", direct, "--class", 7, *STEPS)
    for options in (("--client", 3), ("--class", 7), ("--samples", f"1:{ids[0]},{ids[1]}")):
        ok("unlearn", "--run", detour, *options, *STEPS)
    ok("purge", "--yes", "--run", detour, "--yes")
    ok("restore", "--run", detour, "R1", "R3", "--force")
    assert sha256(filter_file(detour)) == sha256(filter_file(direct))


def test_a_restored_folder_can_be_asked_the_same_again_with_the_same_filter(tmp_path):
    run = copy_of("collected", tmp_path)
    first = ok("unlearn", "--run", run, "--class", 7, *STEPS, "--json").json
    ok("restore", "--run", run, "R1")
    second = ok("unlearn", "--run", run, "--class", 7, *STEPS, "--json").json
    assert first["filter_sha256"] == second["filter_sha256"]
    assert [one["id"] for one in (*first["requests"], *second["requests"])] == ["R1", "R2"]


def test_two_folders_of_one_recipe_and_the_same_requests_hold_the_same_files(tmp_path):
    runs = [copy_of("collected", tmp_path / name) for name in ("a", "b")]
    for run in runs:
        ok("unlearn", "--run", run, "--class", 7, "--samples", f"1:{sample_ids(1)[0]}", *STEPS)
    first, second = ({k: v for k, v in contents(run).items() if k.startswith("files/")} for run in runs)
    assert first == second


@pytest.mark.parametrize(
    ("limits", "why"),
    [(("--max-loss", 0, "--max-class-loss", 100), "validation data"), (("--max-loss", 100), "points of recall")],
    ids=["accuracy", "a class"],
)
def test_a_declined_request_leaves_no_trace_in_later_filters(tmp_path, limits, why):
    run, fresh = copy_of("collected", tmp_path / "run"), copy_of("collected", tmp_path / "fresh")
    sample = f"1:{sample_ids(1)[0]}"
    declined = fedup("unlearn", "--run", run, "--samples", sample, *limits, "--steps", 1, "--json")
    assert declined.code == 1
    assert why in json.loads(declined.out)["declined"]
    for one in (run, fresh):
        ok("unlearn", "--run", one, "--class", 7, *STEPS)
    assert sha256(filter_file(run)) == sha256(filter_file(fresh))
