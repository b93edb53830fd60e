"""A node's rules and state on disk: what becomes of answers if a file is deleted, old, a link, or open to everybody."""

from dataclasses import asdict

import pytest
from tests.flower._grid import digits
from tests.flower._node import CLIENT
from tests.flower._rules import PRIVACY, K, RuledNode, release_details, write_rules

from fedup import fingerprint
from fedup.clients.moments import MomentsQuestion
from fedup.errors import SettingError
from fedup.flower.rules import load_rules
from fedup.flower.wire import Ask, row_of
from fedup.statistics.integer_moments import MomentConfig

RELEASE = "summarize privately"


def rows_of_the_largest_class(world) -> tuple[int, list[int]]:
    ids, y = world.rows(CLIENT).tolist(), world.federation.y[world.rows(CLIENT)].tolist()
    label = max(set(y), key=y.count)
    return label, [i for i, own in zip(ids, y, strict=True) if own == label]


@pytest.mark.parametrize("name", ["account.json", "groups.safetensors", "record.json"])
def test_a_file_of_the_state_that_is_deleted_or_old_ends_the_answers_that_need_it(tmp_path, name):
    world = digits()
    label, own = rows_of_the_largest_class(world)
    node = RuledNode(world, write_rules(tmp_path / "rules.toml", questions=["moments", "labels"]))
    assert node.moments().status == node.ask(RELEASE, **release_details(0.5)).status == "ok"
    older = (node.folder / name).read_bytes()
    assert [node.moments([label], own[:n]).status for n in (K, 2 * K)] == ["ok", "ok"]
    assert node.ask(RELEASE, **release_details(0.5)).status == "ok"

    def asked() -> list[str]:
        """For a difference of one row, and for one more release."""
        node.restart()
        return [node.moments([label], own[: K + 1]).status, node.ask(RELEASE, **release_details(0.5)).status]

    assert asked() == ["refused", "ok"]
    path, spent = node.folder / name, node.spent()
    newest = path.read_bytes()
    for content in (None, older):
        path.unlink() if content is None else path.write_bytes(content)
        statuses = asked()
        assert statuses == ["refused", "failed"] if name == "account.json" else statuses[0] == "failed"
        path.write_bytes(newest)
    assert node.spent() >= spent and asked() == ["refused", "ok"]


def test_rules_behind_a_link_name_their_folder_so_that_another_link_is_no_new_account(tmp_path):
    real, link = write_rules(tmp_path / "real.toml"), tmp_path / "link.toml"
    link.symlink_to(real)
    with pytest.raises(SettingError, match="is a link"):
        load_rules(link)
    write_rules(real, folder=str(tmp_path / "account"))
    assert load_rules(link).folder == load_rules(real).folder == tmp_path / "account"
    real.chmod(0o666)
    with pytest.raises(SettingError, match="Everybody can write"):
        load_rules(real)
    real.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(SettingError, match="put another file in the place"):
        load_rules(real)
    node = RuledNode(digits(), real)
    assert node.ask(RELEASE, **release_details(0.5)).status == "refused" and not (tmp_path / "account").exists()


def test_rules_that_others_can_exchange_by_a_folder_or_link_above_count_as_none(tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "shared" / "own"
    own.mkdir(parents=True)
    rules = write_rules(own / "rules.toml", folder=str(tmp_path / "account"))
    safe = write_rules(tmp_path / "safe.toml", folder=str(tmp_path / "account"))
    (shared / "link.toml").symlink_to(safe)
    (tmp_path / "first.toml").symlink_to("shared/link.toml")
    paths = [rules, shared / "link.toml", tmp_path / "first.toml"]  # the last: a link to a link
    shared.chmod(0o777)
    for path in paths:
        with pytest.raises(SettingError, match=f"chmod o-w {shared}"):
            load_rules(path)
    for mode in (0o1777, 0o755):  # in a sticky folder others cannot rename what is ours
        shared.chmod(mode)
        assert {load_rules(path).folder for path in paths} == {tmp_path / "account"}


def test_a_node_can_insist_on_guarantees_for_persons(tmp_path):
    rules = write_rules(tmp_path / "rules.toml", privacy={**PRIVACY, "unit": "subject"})
    node = RuledNode(
        digits(), rules, subjects=lambda context: [f"P-{n // 4}" for n in range(len(digits().rows(CLIENT)))]
    )
    answers = {}
    for unit in ("record", "subject"):
        details = release_details(0.5)
        answers[unit] = node.ask(RELEASE, **{**details, "how": {**details["how"], "unit": unit}})
    assert answers["subject"].status == "ok" and len(node.log()) == 3  # with the question that lacked weights
    assert answers["record"].status == "refused" and "persons" in answers["record"].reason


def test_a_record_of_an_earlier_format_ends_exact_answers_and_says_what_to_do(tmp_path):
    node = RuledNode(digits(), write_rules(tmp_path / "rules.toml", questions=["moments"]))
    assert node.moments().status == "ok"
    path = node.folder / "record.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    before = path.read_bytes()
    node.restart()
    answer = node.moments()
    assert answer.status == "failed" and "of format 2" in answer.reason and path.read_bytes() == before


def test_the_same_rows_taken_for_classes_and_for_values_are_the_same_rows(tmp_path):
    """Else two answers, each about enough rows, differ by one row."""
    world = digits()
    _, own = rows_of_the_largest_class(world)
    node = RuledNode(world, write_rules(tmp_path / "rules.toml", questions=["moments", "labels"]))
    how = asdict(MomentConfig(least_rows=1)) | {"targets": "values", "outputs": 1}

    def as_values(excluded: list[int]) -> str:
        about = {"cut": "head", "how": how, "labels": None, "without": [], "excluded": excluded, "targets": "values"}
        about |= {"row": row_of(world.example), "num_classes": 1}
        ask = Ask(MomentsQuestion.kind, fingerprint(world.model), about, world.model.state_dict())
        return node.say(ask).status

    assert node.moments(None, own[:K]).status == "ok"
    assert as_values(own[: K + 1]) == as_values(own[1 : K + 1]) == "refused"
    other = RuledNode(world, write_rules(tmp_path / "other.toml", questions=["moments", "labels"]))
    node = other
    assert as_values(own[: K + 1]) == "ok"  # alone it is enough
