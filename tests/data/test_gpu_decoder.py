"""JPEGs that the reader leaves to the GPU, and what the GPU makes of them."""

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.test_loader_processes import in_processes

from megaclass.data.decode import decode_batch, is_plain_jpeg
from megaclass.data.loader import BatchLoader
from megaclass.data.loading.gpu_decoder import decode_jpegs, decodes_on_gpu
from megaclass.data.loading.reader import BatchPlan, BatchReader
from megaclass.data.loading.ring import Slot
from megaclass.data.sources.open_source import open_source
from megaclass.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZE = 24
# Mean difference of pixels. Decoders differ by up to 10 in images this small and colourful, two images by about 80.
ANOTHER_IMAGE = 20.0
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("torchvision") is None,
    reason="there is no GPU here, or no torchvision",
)


def draw(number: int, size: int = SIZE) -> Image.Image:
    coarse = np.random.default_rng(number).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Plain JPEGs, and one each of what the CPU must decode: grey is plain, too."""
    folder = tmp_path_factory.mktemp("images")
    exif = Image.Exif()
    exif[0x0112] = 6
    others = {
        "another size.jpg": jpeg(draw(1, 30)),
        "turned.jpg": jpeg(draw(2), exif=exif),
        "cmyk.jpg": jpeg(draw(3).convert("CMYK")),
        "cut off.jpg": jpeg(draw(4))[:-40],
        "no image.jpg": b"\xff\xd8\xff no image \xff\xd9",
    }
    for number in range(32):
        place = folder / f"{number % 4}"
        place.mkdir(exist_ok=True)
        kind = "L" if number == 5 else "RGB"
        (place / f"{number:02}.jpg").write_bytes(jpeg(draw(number).convert(kind), subsampling=number % 3))
    for name, content in others.items():
        (folder / "0" / name).write_bytes(content)
    draw(9).save(folder / "1" / "another format.png")
    return folder


def test_only_whole_upright_jpegs_of_the_size_are_left(folder):
    source = open_source(folder)
    left = {source.name_of(i) for i in range(source.num_images) if is_plain_jpeg(source.read(i), (SIZE, SIZE))}
    assert len(left) == 32 and all(Path(name.split(",")[0]).stem.isdigit() for name in left), left


def test_rows_hold_jpegs_or_pixels_and_decoding_what_is_left_gives_the_usual_batch(folder):
    source = open_source(folder)
    plan = {"global_batch": source.num_images, "image_size": (SIZE, SIZE), "seed": 3}
    rows, bad = range(source.num_images), []
    pixels = np.empty((len(rows), SIZE, SIZE, 3), np.uint8)
    indices = np.empty(len(rows), np.int64)
    BatchReader(source, BatchPlan(**plan), lambda index, error: None).fill(0, 0, rows, pixels, indices)

    slot = Slot(*np.zeros((3, len(rows)), np.int64), np.zeros_like(pixels))
    reader = BatchReader(source, BatchPlan(**plan, leaves_jpegs=True), lambda index, error: bad.append(index))
    num_resized = reader.fill(0, 0, rows, slot.images_BHW3, slot.indices_B, slot.encoded_B)
    left = np.flatnonzero(slot.encoded_B)
    # Two images cannot be read. Those that replace them may be left, too.
    assert 32 <= len(left) <= 34 and len(bad) == 2 and num_resized >= 1
    for row in left:
        encoded = slot.images_BHW3[row].reshape(-1)[: slot.encoded_B[row]].tobytes()
        assert encoded == source.read(int(slot.indices_B[row]))
    assert np.array_equal(slot.indices_B, indices)
    reader.decode_left(slot, left.tolist())
    assert np.array_equal(slot.images_BHW3, pixels) and not slot.encoded_B.any()
    assert np.array_equal(slot.labels_B[left], source.labels[indices[left]])


@pytest.mark.parametrize(
    ("device", "has_processes", "reason"),
    [(CPU, True, "training runs on the CPU"), (GPU, True, "torchvision is not installed"), (GPU, False, "torchvision")],
)
def test_a_gpu_that_cannot_decode_is_refused_before_the_start(device, has_processes, reason, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"data.decode is gpu, but {reason}"):
        decodes_on_gpu("gpu", device, has_processes)
    assert not decodes_on_gpu("auto", device, has_processes) and not decodes_on_gpu("cpu", device, has_processes)


def test_the_gpu_decodes_for_loader_processes_only(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert decodes_on_gpu("gpu", GPU, True)
    with pytest.raises(ConfigError, match=r"threads of the rank itself .* set data\.workers to 1 or more"):
        decodes_on_gpu("gpu", GPU, False)


@pytest.mark.gpu
@needs_gpu
def test_pixels_of_the_gpu_are_close_to_those_of_the_cpu():
    # The decoders differ in how they interpolate colours that are stored at half the resolution.
    for subsampling, limit in enumerate((1.0, 4.0, 4.0)):
        encoded = [jpeg(draw(number, 112), subsampling=subsampling) for number in range(16)]
        expected = torch.from_numpy(decode_batch(encoded, (112, 112), ["x"] * 16)).float()
        decoded = decode_jpegs([torch.frombuffer(bytearray(item), dtype=torch.uint8) for item in encoded], GPU)
        difference = (decoded.cpu().float() - expected).abs()
        assert decoded.shape == expected.shape and difference.mean() < limit, (subsampling, difference.mean())


@pytest.mark.gpu
@needs_gpu
def test_batches_that_the_gpu_decodes_hold_the_images_of_those_that_the_cpu_decodes(folder):
    options = {"global_batch": 16, "mirror": False, "seed": 2, "max_bad_fraction": 1.0}
    truth = list(BatchLoader(open_source(folder), **options, image_size=(SIZE, SIZE)).batches(num_steps=12))
    loader = in_processes(folder, 2, device=GPU, decodes_on_device=True, image_size=(SIZE, SIZE), **options)
    for batch, expected in zip(loader.batches(num_steps=12), truth, strict=True):
        assert np.array_equal(batch.indices, expected.indices)
        assert torch.equal(batch.labels.cpu(), expected.labels)
        assert float((batch.images.cpu().float() - expected.images.float()).abs().mean()) < ANOTHER_IMAGE


@pytest.mark.gpu
@needs_gpu
def test_a_jpeg_that_the_gpu_cannot_decode_is_decoded_by_the_cpu_or_replaced(tmp_path):
    for number in range(16):
        content = bytearray(jpeg(draw(number)))
        if number % 5 == 0:
            # Looks whole, but its tables are not there.
            place = content.index(b"\xff\xdb")
            content[place + 2 : place + 60] = bytes(58)
        path = tmp_path / f"{number % 2}" / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    options = {"global_batch": 16, "mirror": False, "max_bad_fraction": 1.0, "image_size": (SIZE, SIZE)}
    truth = next(BatchLoader(open_source(tmp_path), **options).batches())
    batch = next(in_processes(tmp_path, 1, device=GPU, decodes_on_device=True, **options).batches())
    assert np.array_equal(batch.indices, truth.indices)
    assert float((batch.images.cpu().float() - truth.images.float()).abs().mean()) < ANOTHER_IMAGE
