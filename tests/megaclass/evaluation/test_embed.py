import contextlib
import io
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from megaclass.data.pair_file import PairSet
from megaclass.errors import DataError
from megaclass.evaluation.embed import evaluating, part_of_rank
from megaclass.evaluation.images import GivenImages, PairImages
from megaclass.evaluation.protocol import Evaluator
from megaclass_launch.errors import UserError
from megaclass_launch.messages import messages_on_stderr
from megaclass_launch.ranks.collectives import gather_blocks

_SIZE = 8
_CPU = torch.device("cpu")


def embed(model, images, **options):
    return Evaluator(network=model, image_size=images.image_size, **options).embed(images)


def embed_pairs(model, pair_set, *, image_size, name="the pairs", fit=None, **options):
    """Returns normalised embeddings of all 2N images, pairs in consecutive rows, and XNorm."""
    images = PairImages(pair_set=pair_set, image_size=image_size, set_name=name, fit=fit)
    embedded = embed(model, images, **options)
    return embedded.normalised_ND(), embedded.xnorm


class TinyBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.dropout(self.bn(self.conv(x))).flatten(1))


class CountingBackbone(TinyBackbone):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        return super().forward(x)


def _pixels(num_images: int, size: int = _SIZE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_images, size, size, 3), dtype=np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    """Lossless, so tests know the pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _pair_set(num_pairs: int) -> PairSet:
    return PairSet([_png(pixels) for pixels in _pixels(2 * num_pairs)], np.arange(num_pairs) % 2 == 0)


def _embed_on_this_rank(num_pairs: int, batch_size: int) -> tuple[np.ndarray, float]:
    return embed_pairs(TinyBackbone(), _pair_set(num_pairs), image_size=_SIZE, device=_CPU, batch_size=batch_size)


def test_an_embedding_is_the_normalised_sum_of_both_flips():
    backbone = TinyBackbone().double().eval()
    images = torch.from_numpy(_pixels(6)).double().permute(0, 3, 1, 2)
    images = (images / 255 - 0.5) / 0.5
    with torch.no_grad():
        straight, mirrored = backbone(images), backbone(images.flip(-1))
    want = nn.functional.normalize(straight + mirrored)
    norms = torch.cat([straight.norm(dim=1), mirrored.norm(dim=1)])

    embeddings, xnorm = _embed_on_this_rank(3, 4)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, want.numpy(), atol=1e-6)
    assert xnorm == pytest.approx(norms.mean().item(), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 100])
def test_the_size_of_batches_does_not_matter(batch_size):
    embeddings, xnorm = _embed_on_this_rank(5, batch_size)
    want, want_xnorm = _embed_on_this_rank(5, 10)
    np.testing.assert_allclose(embeddings, want, atol=1e-6)
    assert xnorm == pytest.approx(want_xnorm, rel=1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "num_pairs"),
    [(1, 5), (2, 5), (3, 5), (3, 1)],
    ids=["one", "even", "uneven", "fewer images than ranks"],
)
def test_any_number_of_ranks_gives_what_one_gives_on_every_rank(run_ranks, num_ranks, num_pairs):
    want, want_xnorm = _embed_on_this_rank(num_pairs, 3)
    for embeddings, xnorm in run_ranks(num_ranks, _embed_on_this_rank, num_pairs, 3):
        np.testing.assert_allclose(embeddings, want, atol=1e-6)
        assert xnorm == pytest.approx(want_xnorm, rel=1e-6)


def test_an_image_that_stands_in_many_pairs_is_embedded_once():
    distinct = [_png(pixels) for pixels in _pixels(6)]
    drawn = np.random.default_rng(1).permutation(np.repeat(np.arange(6), 11)).tolist()
    counting = CountingBackbone()
    pair_set = PairSet([distinct[number] for number in drawn], np.arange(33) % 2 == 0)
    embeddings, xnorm = embed_pairs(counting, pair_set, image_size=_SIZE, device=_CPU, batch_size=6)
    assert counting.batches == [6, 6], "one batch, straight and mirrored, instead of eleven"
    alone = PairSet(distinct, np.array([True, False, True]))
    want, _ = embed_pairs(TinyBackbone(), alone, image_size=_SIZE, device=_CPU, batch_size=6)
    first_seen = list(dict.fromkeys(drawn))
    np.testing.assert_allclose(embeddings, want[drawn], atol=1e-6)
    assert len(np.unique(embeddings, axis=0)) == len(first_seen) == 6
    # XNorm is the mean over the images of all pairs, not over distinct ones.
    _, repeated = embed_pairs(
        TinyBackbone(), PairSet(pair_set.images[:4] * 2, np.arange(4) > 1), image_size=_SIZE, device=_CPU
    )
    _, once = embed_pairs(TinyBackbone(), PairSet(pair_set.images[:4], np.arange(2) > 0), image_size=_SIZE, device=_CPU)
    assert repeated == pytest.approx(once, rel=1e-6) and xnorm > 0


def _count_work_and_traffic(num_pairs: int) -> tuple[list[int], list[int]]:
    backbone, gathered = CountingBackbone(), []

    def counting(block, group):
        gathered.append(block.numel())
        return gather_blocks(block, group)

    with (
        mock.patch("megaclass.evaluation.protocol.gather_blocks", counting),
        mock.patch("megaclass.distributed.agreement.gather_blocks", counting),
    ):
        embed_pairs(backbone, _pair_set(num_pairs), image_size=_SIZE, device=_CPU, batch_size=2)
    return backbone.batches, gathered


def test_ranks_do_equal_work_and_send_their_part_once(run_ranks):
    # 10 images over 3 ranks: 4 each (two of them repeats), in batches of 2, both flips; rows of D + 2 = 7 floats.
    for batches, gathered in run_ranks(3, _count_work_and_traffic, 5):
        assert batches == [2, 2, 2, 2]
        assert gathered == [4097, 4 * 7]


def test_parts_are_contiguous_equal_and_cover_all_images():
    assert [part_of_rank(10, rank, 3) for rank in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert [part_of_rank(2, rank, 3) for rank in range(3)] == [[0], [1], [1]]


def _embed_damaged_set() -> str:
    pair_set = _pair_set(4)
    pair_set.images[6] = b"no image"
    pair_set.images[7] = b"no image either"
    try:
        embed_pairs(TinyBackbone(), pair_set, image_size=_SIZE, device=_CPU, batch_size=2, name="lfw.bin")
    except UserError as error:
        return str(error)
    return "no error"


def test_an_image_that_does_not_decode_is_an_error_on_every_rank(run_ranks):
    # Image 6 lies in the part of the last rank alone; the others must not wait for it in the gather.
    for message in run_ranks(3, _embed_damaged_set):
        assert "Cannot decode image 6 of lfw.bin (pair 3): " in message


def test_the_model_comes_back_in_the_modes_it_was_in():
    backbone = TinyBackbone().train()
    backbone.bn.eval()
    mean = backbone.bn.running_mean.clone()
    embed_pairs(backbone, _pair_set(2), image_size=_SIZE, device=_CPU, batch_size=2)
    assert (backbone.training, backbone.bn.training, backbone.dropout.training) == (True, False, True)
    assert torch.equal(backbone.bn.running_mean, mean)

    with pytest.raises(RuntimeError, match="inside"), evaluating(backbone):
        assert not torch.is_grad_enabled()
        raise RuntimeError("inside")
    assert (backbone.training, backbone.bn.training, torch.is_grad_enabled()) == (True, False, True)


def test_images_of_another_size_are_refused_unless_scaling_is_asked_for():
    pair_set = PairSet([_png(pixels) for pixels in _pixels(4, size=13)], np.array([True, False]))
    with pytest.raises(
        DataError, match=r"image 0 of lfw\.bin \(pair 0\) has 13 × 13 pixels, but the model takes 8 × 8"
    ):
        embed_pairs(TinyBackbone(), pair_set, image_size=_SIZE, device=_CPU, name="lfw.bin")
    embeddings, _ = embed_pairs(TinyBackbone(), pair_set, image_size=_SIZE, device=_CPU, fit="squash")
    assert embeddings.shape == (4, 5)


def _resized_on_this_rank() -> str:
    pair_set = PairSet([_png(pixels) for size in (_SIZE, 13) for pixels in _pixels(3, size)], np.array([True] * 3))
    with contextlib.redirect_stderr(io.StringIO()) as said, messages_on_stderr():
        embed_pairs(TinyBackbone(), pair_set, image_size=_SIZE, device=_CPU, batch_size=2, name="lfw.bin", fit="pad")
    return said.getvalue()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_rank_0_says_how_many_images_of_all_ranks_were_fitted(run_ranks, num_ranks):
    line = "3 of 6 images (from image 0 of lfw.bin (pair 0) on) had another size and were fitted to 8 × 8."
    assert run_ranks(num_ranks, _resized_on_this_rank) == [f"megaclass: {line}\n", *[""] * (num_ranks - 1)]


def test_without_mirroring_an_embedding_is_that_of_the_image_alone():
    backbone = TinyBackbone().eval()
    images = (torch.from_numpy(_pixels(4)).float().permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        want = backbone(images)
    embeddings, xnorm = embed_pairs(backbone, _pair_set(2), image_size=_SIZE, device=_CPU, mirror=False)
    np.testing.assert_allclose(embeddings, nn.functional.normalize(want).numpy(), atol=1e-6)
    assert xnorm == pytest.approx(want.norm(dim=1).mean().item(), rel=1e-6)


def test_threads_that_decode_change_nothing():
    images = PairImages(pair_set=_pair_set(5), image_size=_SIZE)
    one = embed(TinyBackbone(), images, device=_CPU, batch_size=3)
    four = embed(TinyBackbone(), images, device=_CPU, batch_size=3, num_threads=4)
    np.testing.assert_array_equal(four.sums_ND, one.sums_ND)


def _progress_on_this_rank() -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []
    images = PairImages(pair_set=_pair_set(5), image_size=_SIZE)
    embed(TinyBackbone(), images, device=_CPU, batch_size=4, on_progress=lambda *report: reports.append(report))
    return reports


def test_progress_counts_the_images_of_all_ranks(run_ranks):
    assert _progress_on_this_rank() == [(4, 10), (8, 10), (10, 10)]
    assert run_ranks(2, _progress_on_this_rank) == [[(8, 10), (10, 10)]] * 2


def test_a_set_without_images_is_refused():
    with pytest.raises(DataError, match="there are no images"):
        embed_pairs(TinyBackbone(), PairSet([], np.zeros(0, bool)), image_size=_SIZE, device=_CPU, name="empty.bin")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_a_pillow_image_of_16_bits_has_the_pixels_of_its_file(tmp_path, kind):
    shades = np.linspace(0, 65535, _SIZE * _SIZE).reshape(_SIZE, _SIZE).astype(np.uint16)
    path = tmp_path / "shades"
    Image.fromarray(shades).save(path, kind)
    with Image.open(path) as opened:
        given = GivenImages(images=[path, opened, Image.fromarray(shades)], image_size=_SIZE)
        for index in range(3):
            assert np.array_equal(given.pixels(index)[:, :, 0], shades >> 8)
    wide = GivenImages(images=[Image.fromarray(shades.astype(np.int32))], image_size=_SIZE)
    with pytest.raises(DataError, match=r"grey values of 32 bits .* save it with 8 or 16 bits"):
        wide.pixels(0)
