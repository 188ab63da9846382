"""Synthetic identities: faces drawn by code, the same on every machine that runs the same NumPy.

An identity is a point in the space `IDENTITY` spans (head, eyes, brows, nose, mouth, hair, marks, glasses). An image of
it adds a point of `IMAGE` (pose, expression, light, occlusion, blur, noise, background). Both points are hashed from
(seed, identity, image), so that an image never depends on which others are drawn beside it.

Features that must not reveal an identity differ in each image: colour cast, exposure, background, clothes, place in the
frame. The identity is in the geometry: over thirty measures, each uniform in a range that is visible at 48 pixels.
"""

import numpy as np
from numpy.typing import NDArray

from megaclass.data.synthetic.features import paint
from megaclass.data.synthetic.layers import Canvas, Values
from megaclass.errors import DataError
from megaclass.keyed_random import combine64

MIN_IMAGE_SIZE = 16
MAX_IMAGE_SIZE = 1024

# Lengths are in units of half the height of the head; v points down, u to the side, both from the middle of the head.
# Every value is uniform in its range. An optional feature is present if its `…_draw` is below a share.
IDENTITY: dict[str, tuple[float, float]] = {
    "head_width": (0.66, 0.94),
    "jaw_taper": (0.0, 0.42),
    "jaw_square": (0.0, 0.9),
    "crown_square": (0.0, 0.6),
    "ear_size": (0.10, 0.30),
    "ear_v": (-0.15, 0.20),
    "eye_u": (0.27, 0.47),
    "eye_v": (-0.24, 0.08),
    "eye_width": (0.12, 0.23),
    "eye_height": (0.06, 0.17),
    "eye_tilt": (-0.40, 0.40),
    "iris_size": (0.05, 0.11),
    "iris_tone": (0.0, 1.0),
    "brow_gap": (0.06, 0.22),
    "brow_length": (0.10, 0.27),
    "brow_thickness": (0.018, 0.080),
    "brow_tilt": (-0.45, 0.45),
    "brow_arch": (-1.0, 4.0),
    "nose_length": (0.25, 0.58),
    "nose_width": (0.07, 0.24),
    "nose_bridge": (0.02, 0.10),
    "nostril_size": (0.02, 0.065),
    "mouth_v": (0.14, 0.34),
    "mouth_width": (0.15, 0.40),
    "mouth_curve": (-0.12, 0.12),
    "lip_upper": (0.015, 0.085),
    "lip_lower": (0.025, 0.12),
    "lip_tone": (0.0, 1.0),
    "hairline_v": (-0.92, -0.42),
    "hairline_curve": (-0.9, 0.7),
    "hairline_part": (-0.6, 0.6),
    "hairline_slope": (-0.45, 0.45),
    "hair_wave": (0.0, 0.09),
    "hair_wave_count": (3.0, 9.0),
    "hair_volume": (1.02, 1.30),
    "hair_length": (-0.35, 1.25),
    "hair_tone": (0.0, 1.0),
    "bald_draw": (0.0, 1.0),
    "skin_tone": (0.0, 1.0),
    "cheek_draw": (0.0, 1.0),
    "cheek_u": (0.30, 0.50),
    "cheek_v": (0.12, 0.30),
    "beard_draw": (0.0, 1.0),
    "beard_v": (0.25, 0.75),
    "beard_curve": (-0.9, 0.9),
    "moustache_draw": (0.0, 1.0),
    "moustache_width": (0.14, 0.34),
    "moustache_height": (0.04, 0.12),
    "mole_a_draw": (0.0, 1.0),
    "mole_a_u": (-0.55, 0.55),
    "mole_a_v": (0.05, 0.75),
    "mole_a_size": (0.03, 0.07),
    "mole_b_draw": (0.0, 1.0),
    "mole_b_u": (-0.45, 0.45),
    "mole_b_v": (-0.55, 0.60),
    "mole_b_size": (0.03, 0.06),
    "scar_draw": (0.0, 1.0),
    "scar_u": (-0.45, 0.45),
    "scar_v": (-0.2, 0.55),
    "scar_slope": (-1.5, 1.5),
    "glasses_draw": (0.0, 1.0),
    "glasses_width": (0.17, 0.27),
    "glasses_height": (0.12, 0.25),
    "glasses_square": (0.0, 0.95),
    "glasses_thickness": (0.012, 0.040),
    "glasses_tone": (0.0, 1.0),
}

IMAGE: dict[str, tuple[float, float]] = {
    "place_x": (-0.12, 0.12),
    "place_y": (-0.10, 0.10),
    "scale": (0.64, 0.80),
    "roll": (-0.24, 0.24),
    "yaw": (-0.38, 0.38),
    "pitch": (-0.16, 0.16),
    "eye_open": (0.75, 1.10),
    "gaze_u": (-0.04, 0.04),
    "gaze_v": (-0.02, 0.02),
    "brow_raise": (-0.03, 0.04),
    "smile": (-0.06, 0.08),
    "mouth_open": (-0.08, 0.08),
    "light_u": (-0.35, 0.35),
    "light_v": (-0.25, 0.25),
    "exposure": (0.70, 1.25),
    "cast_red": (0.80, 1.20),
    "cast_green": (0.85, 1.15),
    "cast_blue": (0.80, 1.20),
    "saturation": (0.45, 1.15),
    "haze": (0.0, 0.15),
    "blur": (0.0, 0.25),
    "noise": (0.0, 0.06),
    "occluder_draw": (0.0, 1.0),
    "occluder_angle": (0.0, 6.2832),
    "occluder_distance": (0.65, 1.15),
    "occluder_size": (0.20, 0.42),
    "occluder_stretch": (0.5, 1.6),
    "occluder_red": (0.05, 0.95),
    "occluder_green": (0.05, 0.95),
    "occluder_blue": (0.05, 0.95),
    "glare": (-0.6, 0.5),
    "clothes_red": (0.05, 0.95),
    "clothes_green": (0.05, 0.95),
    "clothes_blue": (0.05, 0.95),
    "back_a_red": (0.10, 0.90),
    "back_a_green": (0.10, 0.90),
    "back_a_blue": (0.10, 0.90),
    "back_b_red": (0.10, 0.90),
    "back_b_green": (0.10, 0.90),
    "back_b_blue": (0.10, 0.90),
    "back_angle": (0.0, 6.2832),
    "back_frequency": (0.5, 6.0),
    "back_phase": (0.0, 6.2832),
}

# Separate the random numbers of the two spaces and of the pixel noise.
_IDENTITY_SALT, _IMAGE_SALT, _NOISE_SALT = 1, 2, 3
# A few images at a time, so that the intermediate maps stay in the processor's cache.
_CHUNK_PIXELS = 16 * 64 * 64


def draw_faces(seed: int, identity: NDArray[np.int64], image: NDArray[np.int64], image_size: int) -> NDArray[np.uint8]:
    """Returns RGB images (B, H, W, 3); entry i is a pure function of (seed, identity[i], image[i], image_size)."""
    if not MIN_IMAGE_SIZE <= image_size <= MAX_IMAGE_SIZE:
        raise DataError(
            f"Cannot draw faces of {image_size} pixels: the size must lie in [{MIN_IMAGE_SIZE}, {MAX_IMAGE_SIZE}]."
        )
    assert identity.shape == image.shape and identity.ndim == 1
    canvas = Canvas.of(image_size)
    num_at_once = max(1, _CHUNK_PIXELS // image_size**2)
    faces_BHW3 = np.empty((len(identity), image_size, image_size, 3), dtype=np.uint8)
    for start in range(0, len(identity), num_at_once):
        part = slice(start, start + num_at_once)
        identity_key = identity[part].astype(np.uint64)
        image_key = combine64(seed, identity_key, image[part].astype(np.uint64))
        person = _spread(combine64(seed, _IDENTITY_SALT, identity_key), IDENTITY)
        scene = _spread(combine64(image_key, _IMAGE_SALT), IMAGE)
        noise_seed = (combine64(image_key, _NOISE_SALT) >> np.uint64(32)).astype(np.uint32)
        faces_BHW3[part] = paint(canvas, person, scene, noise_seed)
    return faces_BHW3


def _spread(key_B: NDArray[np.uint64], space: dict[str, tuple[float, float]]) -> Values:
    """Returns one uniform value per name and image, each of shape (B, 1, 1) to broadcast over pixels."""
    bits_PB = combine64(key_B[None], np.arange(len(space), dtype=np.uint64)[:, None])
    uniform_PB = (bits_PB >> np.uint64(11)).astype(np.float64) * 2.0**-53
    low, high = np.array(list(space.values())).T[..., None]
    values_PB = (low + uniform_PB * (high - low)).astype(np.float32)
    return {name: values_B[:, None, None] for name, values_B in zip(space, values_PB, strict=True)}
