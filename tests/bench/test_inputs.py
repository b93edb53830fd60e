"""Raw images and texts become rows as in training, and decoded data comes from the cache with the same bits."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.bench._pictures import encoded, images_table

from fedup.errors import DataError, MissingDataError, SettingError
from fedup.tasks.datasets import Images, Texts, input_of, load_dataset
from fedup.tasks.datasets import _parquet as parquet
from fedup.tasks.datasets._cache import cache_folder, cached
from fedup.tasks.datasets._parquet import read_images

VOCABULARY = Path(os.environ.get("FEDUP_DATA", "nowhere"), "bert-base-uncased", "vocab.txt")
needs_vocabulary = [
    pytest.mark.data,
    pytest.mark.skipif(not VOCABULARY.is_file(), reason="there is no bert-base-uncased/vocab.txt below FEDUP_DATA"),
]
pytestmark = pytest.mark.usefixtures("cache")
few = settings(max_examples=25, deadline=None, derandomize=True)


def test_digits_from_files_are_the_rows_of_training_up_to_the_rounding_of_pixels():
    from sklearn.datasets import load_digits

    source = load_digits().images
    is_test = np.arange(len(source)) % 5 == 0
    images = input_of("digits")
    pixels = np.round(source * 255 / 16).astype(np.uint8)
    rows = images.prepare([images.read(encoded(one)) for one in pixels])
    digits = load_dataset("digits")
    half_a_pixel = 2 * 0.5 / 255 + 1e-6  # rows run from -1 to 1
    assert float((rows[~is_test] - digits.x).abs().max()) <= half_a_pixel
    assert float((rows[is_test] - digits.test_x).abs().max()) <= half_a_pixel


@few
@given(st.integers(0, 255), st.integers(0, 255))
def test_pixels_lose_the_mean_and_are_divided_by_the_deviation_of_their_channel(first, second):
    images = Images(2, 3, 4, mean=(0.25, 0.5), std=(0.5, 2.0))
    pixels = np.stack([np.full((3, 4), first, np.uint8), np.full((3, 4), second, np.uint8)])
    row, other = images.prepare([pixels, pixels[::-1].copy()])
    assert row.shape == (2, 3, 4)
    assert torch.allclose(row[0], torch.tensor((first / 255 - 0.25) / 0.5), atol=1e-6)
    assert torch.allclose(row[1], torch.tensor((second / 255 - 0.5) / 2.0), atol=1e-6)
    assert torch.equal(other, images.prepare([pixels[::-1].copy()])[0])  # whatever else is in the batch


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF"])
def test_an_image_is_read_as_its_pixels_channels_first_in_the_colours_that_the_model_takes(form):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    color = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    one, three = Images(1, 3, 4, (0.0,), (1.0,)), Images(3, 3, 4, (0.0,) * 3, (1.0,) * 3)
    assert np.array_equal(one.read(encoded(grey, form)), grey[None])
    assert np.array_equal(three.read(encoded(color, form)), color.transpose(2, 0, 1))
    assert np.array_equal(three.read(encoded(grey, form)), np.stack([grey] * 3))
    assert np.array_equal(one.read(encoded(np.stack([grey] * 3, axis=2), form)), grey[None])


@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (28, 28)])
def test_an_image_of_another_size_is_refused_or_resized_and_one_of_the_right_size_is_left(shape):
    images = input_of("digits")
    data = encoded(np.full(shape, 77, np.uint8))
    with pytest.raises(DataError, match=rf"It is {shape[1]}×{shape[0]}, and the model takes 8×8.*--resize"):
        images.read(data)
    assert np.array_equal(images.read(data, resize=True), np.full((1, 8, 8), 77, np.uint8))
    assert np.array_equal(images.read(WHOLE, resize=True), images.read(WHOLE))


WHOLE = encoded(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8))
NOISE = encoded(np.random.default_rng(0).integers(0, 255, (500, 500), dtype=np.uint8))
SECOND = NOISE.index(b"IDAT", NOISE.index(b"IDAT") + 4)  # the second chunk of its pixels


@few
@given(
    st.one_of(
        st.binary(max_size=60),
        st.integers(0, len(WHOLE) - 30).map(lambda length: WHOLE[:length]),
        st.integers(1, 255).map(lambda change: WHOLE[:40] + bytes([WHOLE[40] ^ change]) + WHOLE[41:]),
    )
)
@example(b"\x89PNG\r\n\x1a\n")
@example(b"GIF89a")
@example(NOISE[:SECOND] + bytes(4) + NOISE[SECOND + 4 :])
def test_what_is_damaged_is_read_as_an_image_or_refused_in_words(data):
    try:
        found = input_of("digits").read(data, resize=True)
    except DataError as error:
        assert "no readable image" in str(error)
    else:
        assert found.shape == (1, 8, 8) and len(data) == len(WHOLE)


def test_a_picture_too_large_to_be_one_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DataError, match="no readable image"):
        input_of("digits").read(WHOLE)


# --- triggers


COLOR = Images(3, 7, 6, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
DARK, BRIGHT = (COLOR.scale(torch.full((1, 3, 1, 1), value, dtype=torch.uint8)) for value in (0, 255))  # (1, 3, 1, 1)


@pytest.fixture(scope="module")
def photographs() -> torch.Tensor:
    """Any pixels, and one image all black, one all white. (12, 3, 7, 6)"""
    pixels = torch.randint(256, (12, 3, 7, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pixels[0], pixels[1] = 0, 255
    return COLOR.scale(pixels)


def test_a_patch_is_white_in_the_corner_alone_and_what_is_meant_where_nothing_is_said(photographs):
    expected = photographs.clone()
    expected[..., 3:, 2:] = BRIGHT
    assert torch.equal(COLOR.triggered(photographs, "patch"), expected)
    assert torch.equal(COLOR.triggered(photographs), expected)


def test_a_pixel_is_one_pixel_of_a_rare_colour(photographs):
    expected = photographs.clone()
    expected[:, [0, 2], 4, 3], expected[:, 1, 4, 3] = BRIGHT[:, [0, 2], 0, 0], DARK[:, 1, 0, 0]  # magenta
    assert torch.equal(COLOR.triggered(photographs, "pixel"), expected)
    touched = (COLOR.triggered(photographs, "pixel") != photographs).any(1)  # (N, H, W)
    assert touched.flatten(1).sum(1).tolist() == [1] * len(photographs)


def test_a_blend_mixes_one_pattern_of_black_and_white_into_every_pixel_faintly(photographs):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    marked = COLOR.triggered(photographs, "blend")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(COLOR.triggered(photographs, "blend"), marked)  # of no global seed
    assert bool(((marked - photographs).abs() <= 0.15 * (BRIGHT - DARK) + 1e-6).all())
    assert bool((marked >= DARK).all()) and bool((marked <= BRIGHT).all())
    pattern = (marked - 0.85 * photographs) / 0.15
    is_bright = torch.isclose(pattern, BRIGHT, atol=1e-4)
    assert bool((is_bright | torch.isclose(pattern, DARK, atol=1e-4)).all())
    assert torch.equal(is_bright, is_bright[:1].expand_as(is_bright))  # the same on all images
    assert 0.3 < float(is_bright[0].float().mean()) < 0.7
    assert len({is_bright[0, channel].numpy().tobytes() for channel in range(3)}) == 3  # colours, no greys


def test_a_trigger_that_is_none_is_refused_with_those_there_are(photographs):
    for trigger in ("word", "Patch", "", "patch "):
        with pytest.raises(SettingError, match=rf"^trigger: images have patch, blend, pixel; found {trigger!r}\.$"):
            COLOR.triggered(photographs, trigger)
    with pytest.raises(SettingError, match=r"^trigger: texts have word; found 'patch'\.$"):
        Texts(8).triggered(torch.zeros(1, 8, dtype=torch.long), "patch")


def test_a_linear_model_takes_an_images_pixels_and_which_words_are_in_a_text(photographs):
    assert torch.equal(COLOR.plain(photographs), photographs.reshape(12, 126))
    words = Texts(5).plain(torch.tensor([[1, 7, 7, 2, 0], [1, 2, 0, 0, 0]]))
    assert [row.nonzero().flatten().tolist() for row in words] == [[0, 1, 2, 7], [0, 1, 2]]
    assert float(words.max()) == 1.0  # there or not, however often
    assert Texts(5).plain(torch.full((1, 5), 30521)).sum() == 1  # any piece of the vocabulary has a column


def test_a_text_is_read_as_utf_8_or_refused_and_without_a_vocabulary_it_says_what_is_missing(tmp_path, monkeypatch):
    assert Texts(8).read("Zoë × ρ\n".encode()) == "Zoë × ρ\n"
    with pytest.raises(DataError, match="no text in UTF-8"):
        Texts(8).read("Zoë".encode("latin-1"))
    monkeypatch.delenv("FEDUP_DATA", raising=False)
    for call in (lambda: Texts(8).prepare(["one"]), Texts(8).identity):
        with pytest.raises(MissingDataError, match="FEDUP_DATA is not set"):
            call()
    monkeypatch.setenv("FEDUP_DATA", str(tmp_path))
    (tmp_path / "bert-base-uncased").mkdir()
    for call in (lambda: Texts(8).prepare(["one"]), Texts(8).identity):
        with pytest.raises(MissingDataError, match=r"vocab\.txt is missing: put BERT's vocab\.txt there"):
            call()


class TestTexts:
    """Texts with BERT's own vocabulary."""

    pytestmark = needs_vocabulary

    def test_texts_become_pieces_between_marks_filled_to_one_length(self):
        pieces = VOCABULARY.read_text(encoding="utf-8").splitlines()
        rows = Texts(8).prepare(["Wall Street rallies", ""])
        assert rows.dtype == torch.int64
        assert [pieces[i] for i in rows[0]][:4] == ["[CLS]", "wall", "street", "rallies"]
        assert [pieces[i] for i in rows[0]][4:] == ["[SEP]", "[PAD]", "[PAD]", "[PAD]"]
        assert [pieces[i] for i in rows[1]] == ["[CLS]", "[SEP]", *["[PAD]"] * 6]

    def test_rows_do_not_depend_on_what_else_is_in_the_batch_and_long_texts_are_cut(self):
        texts = ["Zoë's stock fell", "x", "", "日本 wins 3-1!", "word " * 100]
        together = Texts(16).prepare(texts)
        shorter = Texts(4).prepare(texts)
        assert torch.equal(together, torch.cat([Texts(16).prepare([text]) for text in texts]))
        assert torch.equal(shorter[-1, :-1], together[-1, :3])
        assert shorter[-1, -1] == together[-1, -1]  # the mark of the end

    def test_a_word_at_the_end_is_the_one_trigger_of_texts(self):
        rows = Texts(8).prepare(["Wall Street rallies", ""])
        marked = Texts(8).triggered(rows, "word")
        assert torch.equal(marked, Texts(8).prepare(["Wall Street rallies cf", "cf"]))
        assert torch.equal(marked, Texts(8).triggered(rows))

    def test_the_identity_holds_the_vocabulary(self, tmp_path, monkeypatch):
        before = Texts(8).identity()
        assert before["kind"] == "text"
        assert before["shape"] == [8]
        (tmp_path / "bert-base-uncased").mkdir()
        copy = tmp_path / "bert-base-uncased" / "vocab.txt"
        copy.write_bytes(VOCABULARY.read_bytes())
        monkeypatch.setenv("FEDUP_DATA", str(tmp_path))
        assert Texts(8).identity() == before  # wherever it lies
        copy.write_bytes(VOCABULARY.read_bytes() + b"more\n")
        assert Texts(8).identity() != before

    def test_news_are_the_rows_that_prediction_would_make_of_their_texts(self, tmp_path, monkeypatch):
        """AG News of two files of our own, beside the real vocabulary."""
        (tmp_path / "bert-base-uncased").mkdir()
        (tmp_path / "bert-base-uncased" / "vocab.txt").write_bytes(VOCABULARY.read_bytes())
        (tmp_path / "ag_news").mkdir()
        texts = {"train": ["Oil falls", "Cup final", "Zoë × ρ", "x " * 90], "test": ["Moon", "Bank", "Goal", "War"]}
        for split, values in texts.items():
            table = pa.table({"text": values, "label": [2, 1, 3, 0]})
            pq.write_table(table, tmp_path / "ag_news" / f"{split}-00000-of-00001.parquet")
        monkeypatch.setenv("FEDUP_DATA", str(tmp_path))
        for _ in range(2):  # decoded, then from the cache
            news = load_dataset("ag_news")
            assert torch.equal(news.x, input_of("ag_news").prepare(texts["train"]))
            assert torch.equal(news.test_x, input_of("ag_news").prepare(texts["test"]))
            assert news.y.tolist() == [2, 1, 3, 0]
            assert news.x.dtype == torch.int64


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)


def write_source(path, pixels):
    pq.write_table(images_table(list(pixels), list(range(len(pixels)))), path)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "train.parquet"
    write_source(path, PIXELS)
    return path


@pytest.fixture
def decoded(monkeypatch):
    """Which files were decoded, in order; decoding itself is the real one."""
    files, decode = [], parquet._decode_images

    def noted(path, *columns):
        files.append(path.name)
        return decode(path, *columns)

    monkeypatch.setattr(parquet, "_decode_images", noted)
    return files


def reads(source, pixels=PIXELS):
    """Read the source, and check every bit of it."""
    images, labels = read_images(source, image_column="image")
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), pixels[:, None])
    assert labels.tolist() == list(range(len(pixels)))
    assert labels.dtype == torch.int64
    return images


def test_the_second_read_comes_from_the_cache_with_the_same_bits(source, decoded, cache, tmp_path):
    other = tmp_path / "test.parquet"
    write_source(other, PIXELS[:3])
    for _ in range(3):
        reads(source).fill_(0)  # what is done to rows does not reach the cache
        reads(other, PIXELS[:3])
    assert decoded == ["train.parquet", "test.parquet"]
    assert cache_folder() == cache
    assert [path.name for path in cache.rglob("*") if path.name.startswith(".")] == []  # no partial file stays


def test_a_source_that_changed_and_kept_its_size_is_decoded_anew_and_each_purpose_has_its_own(tmp_path):
    source = tmp_path / "source"
    for time, content in enumerate([b"a", b"b"], start=1):
        source.write_bytes(content)
        os.utime(source, ns=(time, time))
        for purpose in "xyx":
            values = np.array([*content, ord(purpose)])
            found = cached(source, purpose, lambda values=values: {"a": values})
            assert found["a"].tolist() == values.tolist()


@few
@given(st.none() | st.integers(0, 60) | st.just(-1), st.sampled_from(["images.npy", "content.json"]), st.booleans())
def test_a_damaged_cache_is_decoded_anew_and_good_again(tmp_path_factory, length, name, flipped):
    folder = tmp_path_factory.mktemp("cache")
    write_source(folder / "train.parquet", PIXELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDUP_CACHE", str(folder / "cache"))
        reads(folder / "train.parquet")
        (path,) = (folder / "cache").rglob(name)
        good = path.read_bytes()
        if length is None and not flipped:
            path.unlink()
        else:
            path.write_bytes((good[:-1] + bytes([good[-1] ^ 1]))[: length if not flipped else None])
        reads(folder / "train.parquet")
        assert path.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_done_without(source, decoded, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("mine")
    for place in (tmp_path / "a file", tmp_path / "a file" / "deeper", Path("/proc/nowhere")):
        monkeypatch.setenv("FEDUP_CACHE", str(place))
        reads(source)
    assert decoded == ["train.parquet"] * 3
    assert (tmp_path / "a file").read_text() == "mine"


def test_the_cache_lies_where_the_user_says_or_where_caches_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("FEDUP_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "fedup"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fedup"
