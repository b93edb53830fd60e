"""The paper's five pairs of data set and model learn from real data, forget a class and get every bit back."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

from fedup import FilterConfig, Forget, collect, fingerprint, plug, restore, unlearn
from fedup.errors import ArtifactError
from fedup.statistics.centroids import CentroidConfig
from fedup.tasks.datasets import files_of
from fedup.tasks.evaluation import predict
from fedup.tasks.models import build_model
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import federate

_SOURCE = Path(os.environ.get("FEDUP_DATA") or "/nowhere")
# Few rows and many small steps, so that even seconds of training leave the first loss well behind.
PAIRS = {
    ("mnist", "lenet5"): ({"rows": 300, "rounds": 8, "batch_size": 8}, 0.8),
    ("cifar10", "resnet18"): ({"rows": 60, "rounds": 1, "batch_size": 8}, 1.0),
    ("cifar10", "vit"): ({"rows": 60, "rounds": 2, "batch_size": 8}, 0.9),
    ("ag_news", "tinybert"): ({"rows": 100, "rounds": 6, "batch_size": 4, "lr": 1e-3}, 0.97),
    ("cifar100", "resnet34"): ({"rows": 40, "rounds": 1, "batch_size": 8}, 1.0),
}


def pair(data: str, model: str):
    """A pair that is skipped where its real data is not here."""
    missing = [file.place for file in files_of(data) if not (_SOURCE / file.place).is_file()]
    reason = f"{data}: {', '.join(missing)} missing below FEDUP_DATA={os.environ.get('FEDUP_DATA')}"
    marks = [pytest.mark.data, pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=reason)]
    return pytest.param(data, model, marks=marks, id=f"{data}-{model}")


@pytest.fixture
def few(tmp_path, monkeypatch):
    """The first rows of the real files, in place of all of them: decoding those takes longer than the tests."""
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDUP_DATA", str(tmp_path / "data"))

    def few(data: str) -> None:
        for file in files_of(data):
            place = tmp_path / "data" / file.place
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix != ".parquet":
                place.symlink_to(_SOURCE / file.place)
                continue
            rows = next(pq.ParquetFile(_SOURCE / file.place).iter_batches(batch_size=400))
            pq.write_table(pa.Table.from_batches([rows]), place)

    return few


@pytest.mark.parametrize(("data", "model"), [pair(*names) for names in PAIRS])
def test_a_pair_learns_forgets_a_class_and_gets_every_bit_back(few, data, model):
    few(data)
    how, share = PAIRS[data, model]
    recipe = Recipe.suited_to(data, model=model, clients=2, partition="iid", **how)
    dataset = recipe.load()
    federation = recipe.federation(dataset)
    blank = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes).eval()
    trained = federate(blank, federation, rounds=recipe.rounds, local=recipe.local, seed=recipe.seed).model
    assert all(bool(tensor.isfinite().all()) for tensor in trained.state_dict().values())

    rows = federation.rows("train")
    x, y = federation.x[rows], federation.y[rows]
    original = predict(trained, x)
    before, after = float(cross_entropy(predict(blank, x), y)), float(cross_entropy(original, y))
    assert after < share * before, (before, after)

    learned = fingerprint(trained)
    label = int(y.mode().values)
    centroids = collect(trained, federation, statistics=CentroidConfig(ratio=0.5))
    plugged = plug(trained)
    request = Forget.classes([label])
    unlearn(plugged, centroids, request, clients=federation, config=FilterConfig(rank=8, steps=50), force=True)
    forgotten = predict(plugged, x)
    assert not bool((forgotten.argmax(1) == label).any())
    assert not torch.equal(forgotten, original)
    restore(plugged, centroids, request, clients=federation)
    back = plugged.unplug()
    assert fingerprint(back) == fingerprint(trained) == learned
    assert torch.equal(predict(back, x), original)


# --- tinybert with weights of others


@pytest.fixture
def tiny() -> nn.Module:
    pytest.importorskip("transformers")
    return _built(1)


def _built(seed: int, num_classes: int = 4) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model("tinybert", (16,), num_classes).eval()


def _texts() -> torch.Tensor:
    ids = torch.randint(1, 30000, (5, 16), generator=torch.Generator().manual_seed(0))
    ids[1, 9:] = 0  # a short one
    return ids


@torch.no_grad()
def _encoded(model: nn.Module) -> list[torch.Tensor]:
    ids = _texts()
    found = model.bert(input_ids=ids, attention_mask=(ids != 0).long())
    return [found.last_hidden_state, found.pooler_output]


@pytest.mark.parametrize("classifier", [False, True])
def test_the_encoder_of_a_folder_that_transformers_saved_is_taken_to_the_bit_and_the_last_layer_stays(
    tiny, tmp_path, classifier
):
    from transformers import AutoModel, BertForSequenceClassification

    saved = tiny.bert
    if classifier:
        saved = BertForSequenceClassification(tiny.bert.config)
        saved.bert.load_state_dict(tiny.bert.state_dict())
    saved.save_pretrained(tmp_path / "saved")
    other = _built(2, num_classes=7)
    head = other.head.weight.detach().clone()
    assert not torch.equal(_encoded(other)[1], _encoded(tiny)[1])
    other.load_pretrained(tmp_path / "saved")
    for ours, theirs in zip(_encoded(other), _encoded(tiny), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(other.head.weight, head)
    recipe = Recipe(data="ag_news", model="tinybert", rounds=1, weights=str(tmp_path / "saved"))
    assert torch.equal(_encoded(recipe.blank_model((16,), 4).eval())[1], _encoded(tiny)[1])
    tiny.bert = AutoModel.from_pretrained(tmp_path / "saved", local_files_only=True).eval()
    assert torch.equal(_encoded(other)[1], _encoded(tiny)[1])  # what transformers itself makes of the folder


@pytest.mark.parametrize("spoilt", ["nothing", "no weights", "no configuration", "no JSON", "half", "deeper", "a part"])
def test_a_folder_without_such_weights_is_refused(tiny, tmp_path, spoilt):
    # Found here: where weights were missing, transformers made up random ones, and they were taken.
    folder = tmp_path / "saved"
    tiny.bert.save_pretrained(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if spoilt in ("nothing", "no configuration"):
        config.unlink()
    if spoilt in ("nothing", "no weights"):
        weights.unlink()
    if spoilt == "no JSON":
        config.write_text("{")
    if spoilt == "deeper":
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    if spoilt == "half":
        os.truncate(weights, 10_000)
    if spoilt == "a part":
        kept = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith("pooler")}
        save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"saved holds no weights of a 2-layer, 128-wide BERT"):
        _built(2).load_pretrained(folder)


def test_a_folder_for_a_model_that_takes_none_is_refused(tmp_path):
    recipe = Recipe(data="mnist", model="lenet5", rounds=1, weights=str(tmp_path))
    with pytest.raises(ArtifactError, match=r"is a folder, and .* takes a file of weights only"):
        recipe.blank_model((1, 28, 28), 10)
