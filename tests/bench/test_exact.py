"""The benchmark of exact mode, and the backbones: what is measured is what learning without the data gives."""

import json
import shutil

import pytest
import torch
from tests.cli._in_process import ok, refused
from torch.nn.functional import normalize
from transformers import (
    BertConfig,
    BertModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

import fedup
from fedup.bench.result_tables import write_result_tables
from fedup.errors import FedUPError, MissingDataError, SettingError
from fedup.models.features import FeatureReader
from fedup.models.views import fingerprint
from fedup.tasks.backbones import backbone_names, load_backbone
from fedup.tasks.backbones._hugging_face import PooledEncoder

SHAPES = {"image": (3, 32, 32), "text": (16,)}


def test_features_are_computed_once_and_forgetting_is_learning_without(tmp_path, monkeypatch):
    out = tmp_path / "results" / "exact" / "digits-random_conv.json"
    command = ("bench", "exact", "--rows", 300, "--test-rows", 60, "--cache", tmp_path / "features", "--out", out)
    ok(*command)
    result = json.loads(out.read_text())
    assert result["many_clients"]["equal"] and result["learned"]["accuracy"] > 0.8
    for attack in (result["flipping"], result["backdoor"]):
        assert attack["equal"] and attack["forgotten"] == attack["learned_without"] and attack["claim"] == "exact"
    assert result["backdoor"]["with"]["led_astray"] > 0.5 > result["backdoor"]["forgotten"]["led_astray"]
    sizes = [line["store_bytes"] for line in result["projections"]]
    assert sizes == sorted(sizes) and sizes[-1] < result["learned"]["store_bytes"]
    with monkeypatch.context() as patched:
        patched.setattr(FeatureReader, "at_once", None)  # a second run computes no feature of an image
        patched.setattr("fedup.bench.exact._Bench.learned", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ok(*command)
    assert "| digits, random_conv |" in write_result_tables(tmp_path)[0].read_text()


def test_heads_before_and_after_show_a_row_and_membership_is_that_of_learning_without(tmp_path):
    out = tmp_path / "results" / "attacks" / "digits-exact.json"
    ok("bench", "attack", "--exact", "--data", "digits", "--trials", 20, "--out", out)
    found = {result["protection"]: result["figure"] for result in json.loads(out.read_text())["results"]}
    assert found["none, totals"] == 1 and found["none, heads"] > 0.9
    assert found["exact, after the request"] == found["exact, learned without"]
    assert "attack --exact" in write_result_tables(tmp_path)[0].read_text()


@pytest.mark.parametrize("name", backbone_names())
def test_a_backbone_is_public_and_gives_the_same_features_again(name):
    module = __import__(f"fedup.tasks.backbones.{name}", fromlist=["TAKES"])
    shape = SHAPES[module.TAKES]
    try:
        backbone, again = load_backbone(name, shape), load_backbone(name, shape)
    except MissingDataError as error:
        pytest.skip(f"its packages are not installed: {error}")
    assert backbone.origin == module.ORIGIN and fedup.fingerprint(backbone) == fedup.fingerprint(again)
    x = torch.randn(2, *shape) if module.TAKES == "image" else torch.randint(1, 1000, (2, *shape))
    assert torch.equal(backbone(x), again(x)) and float(backbone(x).norm(dim=1).max()) < backbone.bound
    with pytest.raises(SettingError, match="choose another"):
        load_backbone(name, SHAPES["text" if module.TAKES == "image" else "image"])


def test_a_backbone_of_ones_own_gets_pixels_as_it_was_trained_with(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(
        "from torch import nn\nfrom fedup import Origin\nORIGIN = Origin('mine', 'none', 'me')\nPIXELS = (0.5, 0.25)\n"
        "def build(shape):\n    return nn.Flatten()\n"
    )
    pixels = torch.rand(4, 1, 2, 2)
    backbone = load_backbone(str(own), (1, 2, 2), inputs={"kind": "image", "mean": [0.2], "std": [0.5]})
    assert torch.allclose(backbone((pixels - 0.2) / 0.5), ((pixels - 0.5) / 0.25).flatten(1), atol=1e-6)
    assert "mean 0.5 and deviation 0.25" in backbone.preprocessing and backbone.origin.declared_by == "me"


def test_a_hugging_face_folder_is_a_backbone_and_says_where_it_comes_from(tmp_path):
    folder = tmp_path / "encoder"
    small = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=99)
    BertModel(small).save_pretrained(folder)
    texts = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    undeclared = load_backbone(str(folder), (5,))
    assert undeclared.origin is None
    padded = torch.tensor([[5, 6, 7]])
    assert torch.allclose(undeclared(texts)[:1], undeclared(padded), atol=1e-5)  # filling changes nothing
    about = {"source": "drawn in a test", "licence": "none", "declared_by": "the test", "pooling": "cls"}
    (folder / "fedup.json").write_text(json.dumps(about))
    declared = load_backbone(str(folder), (5,))
    assert declared.origin.declared_by == "the test"
    assert not torch.allclose(declared(texts), undeclared(texts))
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(FedUPError):
        load_backbone(str(tmp_path / "broken"), (5,))


@pytest.mark.parametrize(("kind", "pooling"), [("vit", "cls"), ("vit", "mean"), ("resnet", "mean")])
def test_a_folder_of_an_image_model_gets_pixels_as_its_own_processor_makes_them(tmp_path, kind, pooling):
    tokens = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    stages = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    vit = ViTConfig(**tokens, image_size=32, patch_size=8)
    model = ViTModel(vit) if kind == "vit" else ResNetModel(ResNetConfig(**stages))
    settings = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "resample": 2 if kind == "vit" else 3}
    processor = ViTImageProcessor(size={"height": 32, "width": 32}, **settings)
    model.eval().save_pretrained(tmp_path)
    with pytest.raises(MissingDataError, match=r"preprocessor_config\.json is missing"):
        load_backbone(str(tmp_path), (3, 24, 24))
    if kind == "vit":
        processor.save_pretrained(tmp_path)
    else:  # the same by another way
        cut = {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, **cut}))
    about = {"source": "a", "licence": "b", "declared_by": "c", "pooling": pooling}
    (tmp_path / "fedup.json").write_text(json.dumps(about))
    pixels = torch.randint(0, 256, (3, 3, 24, 24), dtype=torch.uint8)
    inputs = {"kind": "image", "mean": [0.3, 0.4, 0.5], "std": [0.1, 0.2, 0.3]}
    backbone = load_backbone(str(tmp_path), (3, 24, 24), inputs=inputs)
    mean, std = (torch.tensor(inputs[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        made = processor(list(pixels), return_tensors="pt")["pixel_values"]
        expected = model(pixel_values=made).last_hidden_state
    expected = expected.mean((2, 3)) if kind == "resnet" else expected[:, 0] if pooling == "cls" else expected.mean(1)
    found = backbone((pixels / 255 - mean) / std)
    assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max())) and backbone.origin.source == "a"


@torch.no_grad()
def test_features_at_several_depths_are_those_of_each_depth_whatever_pads_the_text():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertModel(BertConfig(**sizes, vocab_size=50)).eval()
    ids = torch.randint(1, 50, (4, 9))
    several = PooledEncoder(encoder, unit=True, depths=(0, 2, 3)).eval()
    found, last = several(ids), PooledEncoder(encoder, unit=True).eval()(ids)
    assert found.shape == (4, 48) and torch.allclose(found[:, 32:], last, atol=1e-6)
    assert torch.allclose(found[:, :16], normalize(encoder.embeddings(ids).mean(1), dim=1), atol=1e-6)
    assert torch.allclose(several(torch.cat([ids, torch.zeros(4, 5, dtype=torch.long)], 1)), found, atol=1e-5)
    others = PooledEncoder(encoder, unit=True, depths=(0, 1, 3)).eval()
    assert fingerprint(others) != fingerprint(several)  # statistics of one are none of the other
    others.load_state_dict(several.state_dict())
    assert fingerprint(others) == fingerprint(several) and torch.equal(others(ids), found)


def test_a_benchmark_with_more_features_forgets_as_exactly_and_its_table_names_them(tmp_path):
    out = tmp_path / "results" / "exact" / "digits-random_conv-700_features.json"
    cache = ("--cache", tmp_path / "features", "--out", out)
    ok("bench", "exact", "--rows", 300, "--test-rows", 60, "--features", 700, *cache)
    result = json.loads(out.read_text())
    assert (result["features"], result["backbone_features"], result["projections"]) == (700, 576, [])
    assert result["flipping"]["equal"] and result["backdoor"]["equal"] and result["many_clients"]["equal"]
    table = write_result_tables(tmp_path)[0].read_text()
    assert "| digits, random_conv, 700 features |" in table and "--seed 0 --features 700`" in table


def test_a_backbone_that_is_missing_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "9.9")
    with pytest.raises(MissingDataError, match=r"9\.9 is installed: other weights are another backbone"):
        load_backbone("minilm", (16,))
    monkeypatch.undo()
    missing = ("bench", "exact", "--backbone", "no_such_backbone", "--out", tmp_path / "a.json")
    refused(*missing, told="there is no 'no_such_backbone'")
