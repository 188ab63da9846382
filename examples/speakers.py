"""Recognises speakers: log filter banks of any length, large-margin training with sub-centres, and trials of unknown voices.

    python examples/speakers.py                       # 100 voices, about a minute on two cores
    python examples/speakers.py --voices 20 --epochs 2
    megaclass run -np 2 python examples/speakers.py   # on two ranks

The voices are spoken by espeak-ng if it is installed, otherwise they are drawn: pulses at the pitch of a voice through the
resonances of its vocal tract. Half as many further voices are never trained on; pairs of their utterances give the equal
error rate. Voices of your own are a class like `Voices` below.
"""

import argparse
import io
import os
import shutil
import subprocess
import wave

import numpy as np
import torch
from torch import Tensor, nn

import megaclass
from megaclass.data.sources.open_source import FORMATS
from megaclass.data.sources.source import SourceFormat

RATE, FRAME, HOP, NUM_BANDS, BATCH = 8000, 256, 80, 40, 64
# First, second and third resonance of five vowels, in Hz, for a vocal tract of average length.
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "north", "south", "east", "west", "yes", "no", "stop"]


def drawn_utterance(voice: int, take: int) -> np.ndarray:
    """Returns a second or so of a voice that says a few vowels; the pitch, the vocal tract and the breath tell voices apart."""
    person, scene = np.random.default_rng([voice, 1]), np.random.default_rng([voice, take, 2])
    pitch, tract, breath, tilt = (
        person.uniform(80, 280),
        person.uniform(0.8, 1.25),
        person.uniform(0.01, 0.2),
        person.uniform(1, 3),
    )
    shifts = person.normal(1, 0.08, size=3)
    pieces = []
    for vowel in scene.integers(len(VOWELS), size=scene.integers(4, 9)):
        length = int(RATE * scene.uniform(0.1, 0.25))
        times = np.arange(length) / RATE
        fundamental = pitch * scene.normal(1, 0.06) * (1 + 0.1 * np.sin(2 * np.pi * scene.uniform(1, 4) * times))
        phase = 2 * np.pi * np.cumsum(fundamental) / RATE
        sound = breath * scene.normal(size=length)
        for number in range(1, int(0.45 * RATE / pitch)):
            frequency = number * pitch
            gain = sum(
                1 / (1 + ((frequency - at * tract * shift) / 90) ** 2)
                for at, shift in zip(VOWELS[vowel], shifts, strict=True)
            )
            sound += gain * number ** (-0.5 * tilt) * np.sin(number * phase)
        pieces.append(sound * np.hanning(length))
    whole = np.concatenate(pieces)
    return whole + 0.02 * whole.std() * scene.normal(size=len(whole))


def spoken_utterance(voice: int, take: int) -> np.ndarray:
    """Returns an utterance of espeak-ng, whose variant, pitch and accent tell voices apart."""
    person, scene = np.random.default_rng([voice, 1]), np.random.default_rng([voice, take, 2])
    variant = person.choice(["m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5", "croak"])
    accent = person.choice(["en", "en-us", "de", "fr", "es", "it", "nl", "pl"])
    said = [f"{accent}+{variant}", "-p", str(person.integers(10, 95)), "-s", str(scene.integers(140, 220))]
    text = " ".join(scene.choice(WORDS, size=4))
    sound = subprocess.run(["espeak-ng", "-v", *said, "--stdout", text], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(sound)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 32768
        given = file.getframerate()
    # Averaged over the new distance of samples first: higher frequencies would fold back.
    width = max(1, given // RATE)
    smooth = np.convolve(samples, np.full(width, 1 / width), mode="same")
    return np.interp(np.arange(0, len(samples) / given, 1 / RATE), np.arange(len(samples)) / given, smooth)


def filter_banks(sound: np.ndarray) -> Tensor:
    """Returns the logarithm of the energy in 40 bands of the mel scale (T, 40), every 10 ms, without its mean over time."""
    frames_TS = torch.from_numpy(sound.copy()).float().unfold(0, FRAME, HOP) * torch.hann_window(FRAME)
    power_TF = torch.fft.rfft(frames_TS).abs().square()
    mel = torch.linspace(0, float(2595 * np.log10(1 + RATE / 2 / 700)), NUM_BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    frequencies_F = torch.arange(FRAME // 2 + 1) * RATE / FRAME
    rising_FB = (frequencies_F[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling_FB = (edges[2:] - frequencies_F[:, None]) / (edges[2:] - edges[1:-1])
    energy_TB = power_TF @ torch.minimum(rising_FB, falling_FB).clamp_min(0)
    logs_TB = energy_TB.clamp_min(1e-8).log()
    return logs_TB - logs_TB.mean()


class Voices:
    """Utterances as filter banks, of different lengths: a TensorSource (docs/other-fields.md)."""

    # Any number of rows of 40 numbers.
    image_size = (0, NUM_BANDS)

    def __init__(self, first_voice: int, num_voices: int, takes: range, is_spoken: bool) -> None:
        say = spoken_utterance if is_spoken else drawn_utterance
        self.num_classes = num_voices
        self.num_images = num_voices * len(takes)
        self.labels = np.repeat(np.arange(num_voices), len(takes))
        self.sounds = [
            filter_banks(say(voice, take)) for voice in range(first_voice, first_voice + num_voices) for take in takes
        ]

    def tensors(self, indices: np.ndarray) -> list[Tensor]:
        return [self.sounds[index] for index in indices.tolist()]

    def read(self, index: int) -> bytes:
        return self.sounds[index].numpy().tobytes()

    def name_of(self, index: int) -> str:
        return f"utterance {index}"

    def describe(self) -> str:
        return f"{self.num_images:,} utterances of {self.num_classes:,} voices"


class VoicesFormat(SourceFormat):
    """`voices:FIRST:NUMBER:FROM:TO`: takes FROM to TO of some voices."""

    notation = "voices:FIRST:NUMBER:FROM:TO"
    is_spoken = False

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.startswith("voices:")

    def open(self) -> Voices:
        first, number, start, stop = map(int, self.path.split(":")[1:])
        return Voices(first, number, range(start, stop), self.is_spoken)


class Xvector(nn.Module):
    """Convolutions over time, mean and deviation over the frames of the utterance, a linear layer."""

    def __init__(self, embedding_dim: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        width = 128
        self.frames = nn.Sequential(
            *(nn.Conv1d(image_size[1], width, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(width)),
            *(nn.Conv1d(width, width, 3, padding=2, dilation=2), nn.ReLU(), nn.BatchNorm1d(width)),
            *(nn.Conv1d(width, width, 3, padding=3, dilation=3), nn.ReLU(), nn.BatchNorm1d(width)),
        )
        self.linear = nn.Linear(2 * width, embedding_dim)

    def forward(self, sounds_BTF: Tensor, lengths_B: Tensor) -> Tensor:
        """Takes padded utterances and their lengths; frames behind the end of an utterance do not count."""
        frames_BWT = self.frames(sounds_BTF.transpose(1, 2))
        is_frame_B1T = (torch.arange(sounds_BTF.shape[1], device=lengths_B.device) < lengths_B[:, None])[:, None]
        counts_B1 = lengths_B[:, None]
        mean_BW = (frames_BWT * is_frame_B1T).sum(2) / counts_B1
        squares_BW = ((frames_BWT - mean_BW[:, :, None]).square() * is_frame_B1T).sum(2) / counts_B1
        return self.linear(torch.cat([mean_BW, (squares_BW + 1e-6).sqrt()], dim=1))


def equal_error_rate(embeddings_ND: np.ndarray, labels_N: np.ndarray) -> float:
    """Returns the rate at which as many pairs of one voice are refused as pairs of two voices are accepted."""
    one, other = np.triu_indices(len(labels_N), k=1)
    scores, is_same = (embeddings_ND @ embeddings_ND.T)[one, other], labels_N[one] == labels_N[other]
    order = np.argsort(-scores)
    refused = 1 - np.cumsum(is_same[order]) / is_same.sum()
    accepted = np.cumsum(~is_same[order]) / (~is_same).sum()
    place = np.abs(refused - accepted).argmin()
    return float((refused[place] + accepted[place]) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", type=int, default=100, help="voices to train on; half as many are held out")
    parser.add_argument("--takes", type=int, default=12, help="utterances per voice; three more are held out")
    parser.add_argument("--epochs", type=float, default=15)
    parser.add_argument("--run-dir", default="runs/speakers")
    parser.add_argument("--drawn", action="store_true", help="draw the voices even if espeak-ng is installed")
    options = parser.parse_args()
    VoicesFormat.is_spoken = not options.drawn and shutil.which("espeak-ng") is not None

    FORMATS.insert(0, VoicesFormat)
    num_steps = int(options.epochs * (options.voices * options.takes // BATCH))
    run = megaclass.train(
        {
            "data": {"path": f"voices:0:{options.voices}:0:{options.takes}"},
            "backbone": {"name": "__main__:Xvector", "embedding_dim": 128},
            "head": {
                # A further margin for the hardest other voices, and several centres per voice.
                "margin": "intertopk",
                "margin_options": [["k", 5], ["extra", 0.06]],
                "subcentres": 3,
                # None at first, all of it from the middle of the run on.
                "margin_schedule": [[0, 0.0], [num_steps // 4, 0.0], [num_steps // 2, 1.0]],
                "scale": 32.0,
            },
            "optimizer": {"lr": 0.1, "warmup_epochs": 1.0, "power": 1.0},
            "train": {
                "run_dir": options.run_dir,
                "epochs": options.epochs,
                "global_batch": BATCH,
                "evaluate_sets": [f"voices:0:{options.voices}:{options.takes}:{options.takes + 3}"],
            },
            "export": {"onnx": False},
        },
        overwrite=True,
    )
    if os.environ.get("RANK", "0") != "0":
        return  # rank 0 reports
    model = megaclass.load(run.folder, backbone="__main__:Xvector")
    unknown = Voices(options.voices, max(2, options.voices // 2), range(4), VoicesFormat.is_spoken)
    rate = equal_error_rate(model.embed(unknown.sounds), unknown.labels)
    [known] = run.numbers["verification"].values()
    print(f"Known voices: top-1 {known['top_k']['1']:.1%}. Unknown voices: equal error rate {rate:.1%}.")


if __name__ == "__main__":
    main()
