"""Rules bind questions; against other code a node trusts entities that have signed the app.

This is Flower's own check, in a real deployment; only the hub, which hands on signatures, is played by the test."""

import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign
from tests.flower._deployment import APP, Deployment
from tests.flower._rules import write_rules

import fedup

pytestmark = pytest.mark.slow
REVIEWER, SIGNED_AT = "fpk_reviewer", 1_700_000_000


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    made = Deployment(tmp_path, monkeypatch, 2)
    yield made
    assert made.close() == []


def start(deployment: Deployment, verifications: Path, trusted: Path, rules: Path) -> None:
    """A link that hands on signatures, and nodes that trust the reviewer alone; the second one has no rules."""
    port = deployment.runner.free_port()
    link = ["--host", "127.0.0.1", "--port", str(port), "--insecure", "--disable-runtime-dependency-installation"]
    script = Path(__file__).with_name("signing_link.py")
    deployment.processes.start("superlink", sys.executable, str(script), str(verifications), *link)
    deployment.processes.wait_for(port)
    config = f'[superlink.fedup]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (deployment.home / "config.toml").write_text(config)
    for number, own in enumerate((f'partition-id=0 fedup-rules="{rules}"', "partition-id=1")):
        node = ["--superlink", f"127.0.0.1:{port}", "--port", str(deployment.runner.free_port()), "--insecure"]
        node += ["--trusted-entities", str(trusted), "--node-config", own]
        deployment.processes.start(f"supernode{number}", "flower-supernode", *node)


def store_of(deployment: Deployment):
    return fedup.load_centroids(deployment.out / "centroids.safetensors")


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__")))


def fab_of(deployment: Deployment, app: Path, folder: Path, monkeypatch) -> bytes:
    """The app as Flower packs it."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    deployment.processes.call("flwr", "build", "--app", str(app))
    (fab,) = folder.glob("*.fab")
    return fab.read_bytes()


def test_a_node_runs_the_app_that_its_reviewer_signed_and_no_other_code_and_without_rules_it_refuses(
    deployment, tmp_path, monkeypatch
):
    key, verifications = Ed25519PrivateKey.generate(), tmp_path / "verifications.json"
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "trusted.yaml").write_text(yaml.safe_dump({REVIEWER: public}))
    app, other = (copied(tmp_path / name) for name in ("reviewed", "other"))
    content = fab_of(deployment, app, tmp_path / "fab", monkeypatch)
    signature = key.sign(create_message_to_sign(hashlib.sha256(content).digest(), SIGNED_AT))
    about = {"signature": base64.urlsafe_b64encode(signature).decode(), "signed_at": SIGNED_AT}
    signed = {REVIEWER: json.dumps(about), "valid_license": "Valid"}
    verifications.write_text(json.dumps({hashlib.sha256(content).hexdigest(): signed}))
    start(deployment, verifications, tmp_path / "trusted.yaml", write_rules(tmp_path / "rules.toml"))

    client = other / "faulty" / "client_app.py"
    client.write_text(client.read_text() + "\n# one line more, which nobody has seen\n")
    changed = fab_of(deployment, other, tmp_path / "changed", monkeypatch)
    relabelled = {hashlib.sha256(changed).hexdigest(): signed}  # the signature of the other one
    verifications.write_text(json.dumps({**json.loads(verifications.read_text()), **relabelled}))
    deployment.submit("--stream", app=other)
    assert not (deployment.out / "result.json").exists() and deployment.asked(0) == []
    assert "FAB verification failed" in (deployment.out / "supernode0.log").read_text()

    said = deployment.submit("--stream", app=app, least_fraction=0.5)
    (reason,) = deployment.result(said)["left_out"].values()
    assert reason.startswith("refused: this node has no rules") and list(store_of(deployment).clients) == [0]
    assert [ask["kind"] for ask in deployment.asked(0)] == ["integer moments"] * 2
    log = (tmp_path / "rules.toml.state" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in log] == ["needs weights", "ok"]
