"""`fedup bench withdrawals` as a user runs it."""

from tests.cli._in_process import fedup


def test_wrong_usage_is_told_before_anything_runs(tmp_path):
    wrong = fedup("bench", "withdrawals", "--only", "letters", "--folder", tmp_path)
    assert wrong.code == 2
    assert "memorised" in wrong.err
    lacking = fedup("bench", "withdrawals", "--only", "mnist", "--folder", tmp_path, FEDUP_DATA=str(tmp_path))
    assert lacking.code == 1
    assert "mnist" in lacking.err
    assert not list(tmp_path.iterdir())
