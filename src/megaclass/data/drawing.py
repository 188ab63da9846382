"""How one batch of synthetic faces becomes pixels: soft shapes, stacked front to back, then light, blur and noise.

A shape is a map of signed distances (negative inside, in units of half a head), turned into coverage with an edge one pixel wide.
Each layer takes its share of what the layers before it let through; the shares times the layers' colours give the image.
All maps are float32 of shape (B, H, W); nothing loops over pixels or images.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Map = NDArray[np.float32]
Values = dict[str, Map]
Colour = tuple[Map, Map, Map]

_SKIN_LIGHT = (0.97, 0.80, 0.68)
_SKIN_DARK = (0.45, 0.28, 0.19)
_LIP = (0.72, 0.22, 0.25)
_DARK = (0.07, 0.05, 0.06)
_WHITE = (0.96, 0.96, 0.95)
# Few tones shared by many identities: colour narrows the search, and never names anybody.
_HAIR_TONES = np.array(
    [
        (0.08, 0.07, 0.08),
        (0.24, 0.14, 0.09),
        (0.45, 0.28, 0.15),
        (0.85, 0.68, 0.38),
        (0.62, 0.27, 0.12),
        (0.66, 0.65, 0.64),
    ],
    dtype=np.float32,
)
_IRIS_TONES = np.array(
    [(0.28, 0.16, 0.08), (0.25, 0.42, 0.65), (0.30, 0.48, 0.28), (0.38, 0.38, 0.40)], dtype=np.float32
)
_GLASSES_TONES = np.array(
    [(0.08, 0.08, 0.09), (0.45, 0.10, 0.10), (0.75, 0.62, 0.30), (0.15, 0.22, 0.45)], dtype=np.float32
)

SHARE_BALD = 0.10
SHARE_CHEEKS = 0.30
SHARE_BEARD = 0.25
SHARE_MOUSTACHE = 0.22
SHARE_MOLE = 0.45
SHARE_SCAR = 0.15
SHARE_GLASSES = 0.35
SHARE_OCCLUDED = 0.25


@dataclass(frozen=True)
class Canvas:
    """The pixel grid: x to the right and y down, both in [-1, 1]."""

    size: int
    x_1HW: Map
    y_1HW: Map

    @staticmethod
    def of(size: int) -> Canvas:
        centres = ((np.arange(size, dtype=np.float32) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)
        x_HW, y_HW = np.meshgrid(centres, centres)
        return Canvas(size, x_HW[None], y_HW[None])


@dataclass
class _Layers:
    """Front to back: every layer takes its part of the light the former ones let through."""

    pixels_per_unit: Map
    left: Map
    shares: list[Map] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)

    def coverage(self, distance: Map, softness: float = 1.0) -> Map:
        distance *= self.pixels_per_unit * np.float32(-1.0 / softness)
        distance += np.float32(0.5)
        return np.clip(distance, np.float32(0), np.float32(1), out=distance)

    def put(self, cover: Map, colour: Colour) -> None:
        cover *= self.left
        self.left -= cover
        self.shares.append(cover)
        self.colours.append(colour)

    def flatten(self) -> Map:
        """(B, 3, H, W)"""
        num_images, height, width = self.left.shape
        shares_BLP = np.stack(self.shares, axis=1).reshape(num_images, len(self.shares), height * width)
        colours_B3L = np.empty((num_images, 3, len(self.shares)), dtype=np.float32)
        for layer, colour in enumerate(self.colours):
            for channel in range(3):
                colours_B3L[:, channel, layer] = colour[channel][:, 0, 0]
        return np.matmul(colours_B3L, shares_BLP).reshape(num_images, 3, height, width)


@dataclass
class _Head:
    """Where each pixel lies: (x, y) in the plane of the head, (u, v) on its turned surface, z towards the viewer."""

    x: Map
    y: Map
    z: Map
    u: Map
    v: Map
    side: Map
    inside: Map


def paint(canvas: Canvas, person: Values, scene: Values, noise_seed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """(B, H, W, 3) RGB of the given people in the given scenes."""
    num_images = len(noise_seed)
    pixels_per_unit = scene["scale"] * np.float32(canvas.size / 2)
    layers = _Layers(pixels_per_unit, np.ones((num_images, canvas.size, canvas.size), dtype=np.float32))
    head = _place(canvas, layers, person, scene)
    skin = _mix(
        _fixed(_SKIN_LIGHT, person["skin_tone"]),
        _fixed(_SKIN_DARK, person["skin_tone"]),
        _steps(person["skin_tone"], 4),
    )
    hair = _tone(_HAIR_TONES, person["hair_tone"])

    _occluder(layers, head, scene)
    _glasses(layers, head, person, scene)
    _fringe(layers, head, person, hair)
    _brows(layers, head, person, scene, hair)
    _eyes(layers, head, person, scene, skin)
    _nose(layers, head, person, skin)
    _mouth(layers, head, person, scene, skin)
    _marks(layers, head, person, skin)
    _beard(layers, head, person, hair, skin)
    _skin_and_ears(layers, head, person, skin)
    _hair_behind(layers, head, person, hair)
    _clothes(layers, head, scene, skin)
    _background(layers, canvas, scene)
    return _photograph(layers.flatten(), head, scene, noise_seed)


def _place(canvas: Canvas, layers: _Layers, person: Values, scene: Values) -> _Head:
    cos_roll, sin_roll = np.cos(scene["roll"]), np.sin(scene["roll"])
    x_frame = (canvas.x_1HW - scene["place_x"]) / scene["scale"]
    y_frame = (canvas.y_1HW - scene["place_y"]) / scene["scale"]
    x = cos_roll * x_frame + sin_roll * y_frame
    y = cos_roll * y_frame - sin_roll * x_frame

    width = person["head_width"]
    across = x / width
    across_squared = across * across
    y_squared = y * y
    # The head is an ellipsoid seen from the front: turning it moves what lies towards the viewer, and leaves the outline.
    z = np.sqrt(np.maximum(np.float32(1) - across_squared - np.float32(0.75) * y_squared, np.float32(0)))
    u = (across * np.cos(scene["yaw"]) - z * np.sin(scene["yaw"])) * width
    v = y - z * np.sin(scene["pitch"])

    lower = np.maximum(y, np.float32(0))
    narrowing = np.float32(1) - person["jaw_taper"] * lower * lower
    across_squared /= narrowing * narrowing
    square = np.where(y > 0, person["jaw_square"], person["crown_square"])
    outline = across_squared + y_squared - square * across_squared * np.minimum(y_squared, np.float32(1))
    distance = (np.sqrt(np.maximum(outline, np.float32(0))) - np.float32(1)) * width
    return _Head(x, y, z, u, v, np.abs(u), layers.coverage(distance))


def _occluder(layers: _Layers, head: _Head, scene: Values) -> None:
    """A blob before the face's edge: a hand, a branch, someone's shoulder."""
    along = head.x - np.cos(scene["occluder_angle"]) * scene["occluder_distance"]
    down = (head.y - np.sin(scene["occluder_angle"]) * scene["occluder_distance"]) * scene["occluder_stretch"]
    cover = layers.coverage(np.sqrt(along * along + down * down) - scene["occluder_size"])
    cover *= scene["occluder_draw"] < SHARE_OCCLUDED
    layers.put(cover, (scene["occluder_red"], scene["occluder_green"], scene["occluder_blue"]))


def _glasses(layers: _Layers, head: _Head, person: Values, scene: Values) -> None:
    present = person["glasses_draw"] < SHARE_GLASSES
    thickness = person["glasses_thickness"]
    rise = head.v - (person["eye_v"] + np.float32(0.02))
    lens_u = np.maximum(person["eye_u"], person["glasses_width"] + np.float32(0.05))
    across = (head.side - lens_u) / person["glasses_width"]
    down = rise / person["glasses_height"]
    across *= across
    down *= down
    outline = (
        across + down - person["glasses_square"] * np.minimum(across, np.float32(1)) * np.minimum(down, np.float32(1))
    )
    lens = (np.sqrt(np.maximum(outline, np.float32(0))) - np.float32(1)) * np.minimum(
        person["glasses_width"], person["glasses_height"]
    )
    bar = np.abs(rise) - thickness
    outside_lenses = np.abs(head.side - lens_u) - person["glasses_width"]
    frame = np.minimum(np.abs(lens) - thickness, np.maximum(bar, -outside_lenses))
    cover = layers.coverage(frame)
    cover *= present
    cover *= head.inside
    layers.put(cover, _tone(_GLASSES_TONES, person["glasses_tone"]))

    glare = layers.coverage(lens)
    glare *= present * np.maximum(scene["glare"], np.float32(0)) * np.float32(0.8)
    layers.put(glare, _fixed(_WHITE, scene["glare"]))


def _fringe(layers: _Layers, head: _Head, person: Values, hair: Colour) -> None:
    offset = head.u - person["hairline_part"]
    wave = np.sin(head.u * (person["hair_wave_count"] * np.float32(np.pi))) * person["hair_wave"]
    line = (
        person["hairline_v"]
        - person["hairline_curve"] * offset * offset
        + person["hairline_slope"] * np.abs(offset)
        + wave
    )
    # However it is cut, hair stays above the eyes: they carry most of the identity.
    ceiling = (
        person["eye_v"]
        - person["brow_gap"]
        - np.float32(0.12)
        + np.float32(0.9) * np.maximum(head.side - np.float32(0.5), np.float32(0))
    )
    cover = layers.coverage(head.v - np.minimum(line, ceiling))
    cover *= layers.coverage(_hair_outline(head, person))
    cover *= person["bald_draw"] >= SHARE_BALD
    layers.put(cover, hair)


def _hair_outline(head: _Head, person: Values) -> Map:
    across = head.x / (person["head_width"] * person["hair_volume"])
    down = (head.y + np.float32(0.05)) / person["hair_volume"]
    return np.asarray((np.sqrt(across * across + down * down) - np.float32(1)) * person["head_width"])


def _brows(layers: _Layers, head: _Head, person: Values, scene: Values, hair: Colour) -> None:
    along = head.side - person["eye_u"]
    bend = along * along
    height = person["eye_v"] - person["eye_height"] - person["brow_gap"] - scene["brow_raise"]
    middle = height + person["brow_tilt"] * along + person["brow_arch"] * bend
    thickness = person["brow_thickness"] * (
        np.float32(1.15) - np.float32(0.6) * bend / (person["brow_length"] * person["brow_length"])
    )
    distance = np.maximum(np.abs(head.v - middle) - thickness, np.abs(along) - person["brow_length"])
    cover = layers.coverage(distance)
    cover *= head.inside
    layers.put(cover, _mix(hair, _fixed(_DARK, hair[0]), 0.45))


def _eyes(layers: _Layers, head: _Head, person: Values, scene: Values, skin: Colour) -> None:
    along = head.side - person["eye_u"]
    down = head.v - person["eye_v"] - person["eye_tilt"] * along
    reach = along / person["eye_width"]
    opening = np.float32(1) - reach * reach
    opening *= person["eye_height"] * scene["eye_open"]
    lens = np.abs(down) - opening
    eye = layers.coverage(lens.copy())
    eye *= head.inside
    # The gaze goes the same way in both eyes, so it is undone from the mirrored half.
    aside = along - scene["gaze_u"] * np.sign(head.u)
    down = down - scene["gaze_v"]
    from_centre = np.sqrt(aside * aside + down * down)
    pupil = layers.coverage(from_centre - person["iris_size"] * np.float32(0.5))
    pupil *= eye
    layers.put(pupil, _fixed(_DARK, person["iris_size"]))
    iris = layers.coverage(from_centre - person["iris_size"])
    iris *= eye
    layers.put(iris, _tone(_IRIS_TONES, person["iris_tone"]))
    layers.put(eye, _fixed(_WHITE, person["iris_size"]))
    lid = layers.coverage(lens - np.float32(0.03))
    lid *= head.inside
    layers.put(lid, _mix(skin, _fixed(_DARK, skin[0]), 0.75))


def _nose(layers: _Layers, head: _Head, person: Values, skin: Colour) -> None:
    # The nose stands before the face, so a turn of the head moves it further than the eyes.
    side = np.abs(head.u - (head.u - head.x) * np.float32(-0.25))
    top = person["eye_v"] - np.float32(0.02)
    tip = top + person["nose_length"]
    down = (head.v - top) / person["nose_length"]
    half_width = person["nose_bridge"] + (person["nose_width"] - person["nose_bridge"]) * down * down
    nostril_u = (side - person["nose_width"] * np.float32(0.55)) * np.float32(0.8)
    nostril_v = head.v - tip + np.float32(0.01)
    nostrils = layers.coverage(np.sqrt(nostril_u * nostril_u + nostril_v * nostril_v) - person["nostril_size"])
    layers.put(nostrils, _mix(skin, _fixed(_DARK, skin[0]), 0.8))
    ends = np.maximum(head.v - tip - np.float32(0.05), top - head.v)
    body = np.maximum(side - half_width, ends)
    inner = layers.coverage(body + np.float32(0.045))
    layers.put(inner, _mix(skin, _fixed(_WHITE, skin[0]), 0.12))
    edge = layers.coverage(body)
    edge *= np.clip(down, np.float32(0), np.float32(1))
    layers.put(edge, _mix(skin, _fixed(_DARK, skin[0]), 0.42))


def _mouth(layers: _Layers, head: _Head, person: Values, scene: Values, skin: Colour) -> None:
    reach = head.u / person["mouth_width"]
    reach *= reach
    centre = person["eye_v"] + person["nose_length"] + person["mouth_v"]
    down = head.v - centre + (person["mouth_curve"] + scene["smile"]) * (reach - np.float32(0.4))
    arch = np.float32(1) - reach
    gap = np.maximum(scene["mouth_open"], np.float32(0)) + np.float32(0.014)
    inner = np.abs(down) - gap * arch
    hole = layers.coverage(inner)
    layers.put(hole, _mix(_fixed(_DARK, skin[0]), _fixed(_LIP, skin[0]), 0.2))
    upper = -down - (person["lip_upper"] + gap) * arch
    lower = down - (person["lip_lower"] + gap) * arch
    lips = layers.coverage(np.maximum(upper, lower))
    layers.put(
        lips, _mix(skin, _fixed(_LIP, skin[0]), np.float32(0.45) + np.float32(0.4) * _steps(person["lip_tone"], 3))
    )


def _marks(layers: _Layers, head: _Head, person: Values, skin: Colour) -> None:
    dark_skin = _mix(skin, _fixed(_DARK, skin[0]), 0.7)
    for mole in ("mole_a", "mole_b"):
        across, down = head.u - person[f"{mole}_u"], head.v - person[f"{mole}_v"]
        cover = layers.coverage(np.sqrt(across * across + down * down) - person[f"{mole}_size"])
        cover *= person[f"{mole}_draw"] < SHARE_MOLE
        cover *= head.inside
        layers.put(cover, dark_skin)
    across, down = head.u - person["scar_u"], head.v - person["scar_v"]
    line = np.abs(down - person["scar_slope"] * across) / np.sqrt(np.float32(1) + person["scar_slope"] ** 2)
    scar = layers.coverage(np.maximum(line - np.float32(0.022), np.abs(across) + np.abs(down) - np.float32(0.24)))
    scar *= person["scar_draw"] < SHARE_SCAR
    scar *= head.inside
    layers.put(scar, _mix(skin, _fixed(_LIP, skin[0]), 0.6))
    across, down = head.side - person["cheek_u"], head.v - person["cheek_v"]
    cheeks = layers.coverage(np.sqrt(across * across + down * down) - np.float32(0.14), softness=4.0)
    cheeks *= (person["cheek_draw"] < SHARE_CHEEKS) * np.float32(0.4)
    cheeks *= head.inside
    layers.put(cheeks, _fixed(_LIP, skin[0]))


def _beard(layers: _Layers, head: _Head, person: Values, hair: Colour, skin: Colour) -> None:
    mouth_v = person["eye_v"] + person["nose_length"] + person["mouth_v"]
    reach = head.u / person["moustache_width"]
    lift = mouth_v - person["lip_upper"] - np.float32(0.05) + np.float32(0.08) * reach * reach
    arch = person["moustache_height"] * (np.float32(1) - reach * reach)
    moustache = layers.coverage(np.abs(head.v - lift) - arch)
    moustache *= person["moustache_draw"] < SHARE_MOUSTACHE
    layers.put(moustache, hair)
    edge = np.maximum(person["beard_v"], person["eye_v"] + person["nose_length"] + np.float32(0.05))
    beard = layers.coverage(edge - person["beard_curve"] * (head.u * head.u) - head.v, softness=2.0)
    beard *= (person["beard_draw"] < SHARE_BEARD) * np.float32(0.8)
    beard *= head.inside
    layers.put(beard, _mix(hair, skin, 0.15))


def _skin_and_ears(layers: _Layers, head: _Head, person: Values, skin: Colour) -> None:
    layers.put(head.inside.copy(), skin)
    across = (np.abs(head.x) - person["head_width"]) / (person["ear_size"] * np.float32(0.6))
    down = (head.y - person["ear_v"]) / person["ear_size"]
    ears = layers.coverage((np.sqrt(across * across + down * down) - np.float32(1)) * person["ear_size"])
    # Long hair falls over the ears.
    ears *= person["hair_length"] < np.float32(0.35)
    layers.put(ears, _mix(skin, _fixed(_DARK, skin[0]), 0.15))


def _hair_behind(layers: _Layers, head: _Head, person: Values, hair: Colour) -> None:
    cap = np.maximum(_hair_outline(head, person), head.y - person["hair_length"])
    fall = np.abs(head.x) - person["head_width"] * person["hair_volume"] * np.float32(0.97)
    fall = np.maximum(fall, np.maximum(np.float32(-0.1) - head.y, head.y - person["hair_length"]))
    cover = layers.coverage(np.minimum(cap, fall))
    cover *= person["bald_draw"] >= SHARE_BALD
    layers.put(cover, _mix(hair, _fixed(_DARK, hair[0]), 0.25))


def _clothes(layers: _Layers, head: _Head, scene: Values, skin: Colour) -> None:
    clothes = layers.coverage(np.float32(1.12) + np.float32(0.12) * head.x * head.x - head.y)
    layers.put(clothes, (scene["clothes_red"], scene["clothes_green"], scene["clothes_blue"]))
    neck = layers.coverage(np.maximum(np.abs(head.x) - np.float32(0.36), np.float32(0.5) - head.y))
    layers.put(neck, _mix(skin, _fixed(_DARK, skin[0]), 0.25))


def _background(layers: _Layers, canvas: Canvas, scene: Values) -> None:
    along = np.cos(scene["back_angle"]) * canvas.x_1HW + np.sin(scene["back_angle"]) * canvas.y_1HW
    stripes = np.sin(along * scene["back_frequency"] + scene["back_phase"]) * np.float32(0.5)
    stripes += np.float32(0.5)
    layers.put(stripes, (scene["back_a_red"], scene["back_a_green"], scene["back_a_blue"]))
    layers.put(np.ones_like(stripes), (scene["back_b_red"], scene["back_b_green"], scene["back_b_blue"]))


def _photograph(image_B3HW: Map, head: _Head, scene: Values, noise_seed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Light, colour cast, blur and noise: what a camera adds, in that order."""
    light = head.x * scene["light_u"]
    light += head.y * scene["light_v"]
    light += np.float32(0.22) * head.z
    light += np.float32(0.85)
    light = np.clip(light, np.float32(0.35), np.float32(1.45), out=light)
    light *= scene["exposure"]
    grey = image_B3HW[:, 0] * np.float32(0.3)
    grey += image_B3HW[:, 1] * np.float32(0.55)
    grey += image_B3HW[:, 2] * np.float32(0.15)
    image_B3HW -= grey[:, None]
    image_B3HW *= scene["saturation"][:, None]
    image_B3HW += grey[:, None]
    image_B3HW *= light[:, None]
    cast_B311 = np.stack([scene["cast_red"], scene["cast_green"], scene["cast_blue"]], axis=1)
    image_B3HW *= cast_B311 * (np.float32(1) - scene["haze"][:, None])
    image_B3HW += scene["haze"][:, None] * np.float32(0.7)
    _blur(image_B3HW, scene["blur"][:, None])
    _add_noise(image_B3HW, scene["noise"], noise_seed)
    image_B3HW *= np.float32(255)
    np.clip(image_B3HW, np.float32(0), np.float32(255), out=image_B3HW)
    return np.ascontiguousarray(image_B3HW.astype(np.uint8).transpose(0, 2, 3, 1))


def _blur(image_B3HW: Map, weight: Map) -> None:
    """Each pixel takes `weight` from both its neighbours, down and then across; the outermost pixels stay."""
    for near, middle, far in (
        (np.s_[:, :, :-2], np.s_[:, :, 1:-1], np.s_[:, :, 2:]),
        (np.s_[..., :-2], np.s_[..., 1:-1], np.s_[..., 2:]),
    ):
        neighbours = image_B3HW[near] + image_B3HW[far]
        neighbours *= weight
        centre = image_B3HW[middle]
        centre *= np.float32(1) - np.float32(2) * weight
        centre += neighbours


def _add_noise(image_B3HW: Map, strength: Map, noise_seed: NDArray[np.uint32]) -> None:
    """Triangular noise, hashed from pixel and seed; one value for the three channels, another share for each."""
    num_images, _, height, width = image_B3HW.shape
    with np.errstate(over="ignore"):
        bits = np.arange(height * width, dtype=np.uint32)[None] * np.uint32(0x9E3779B1) + noise_seed[:, None]
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(0x85EBCA6B)
        bits ^= bits >> np.uint32(13)
        bits *= np.uint32(0xC2B2AE35)
        bits ^= bits >> np.uint32(16)
    for channel, shift in enumerate((0, 10, 20)):
        triangle = ((bits >> np.uint32(shift)) & np.uint32(0x3FF)).astype(np.float32)
        triangle += ((bits >> np.uint32((shift + 15) % 22)) & np.uint32(0x3FF)).astype(np.float32)
        triangle -= np.float32(1023)
        triangle *= strength[:, 0] * np.float32(1 / 1023)
        image_B3HW[:, channel] += triangle.reshape(num_images, height, width)


def _fixed(colour: tuple[float, float, float], like: Map) -> Colour:
    red, green, blue = (np.full_like(like, value) for value in colour)
    return red, green, blue


def _tone(tones: Map, value: Map) -> Colour:
    chosen = np.minimum((value * np.float32(len(tones))).astype(np.int64), len(tones) - 1)
    return tones[chosen, 0], tones[chosen, 1], tones[chosen, 2]


def _steps(value: Map, num_steps: int) -> Map:
    """The value rounded down to one of `num_steps` levels in [0, 1]: many identities share one."""
    return np.asarray(
        np.minimum(np.floor(value * np.float32(num_steps)), np.float32(num_steps - 1)) / np.float32(num_steps - 1)
    )


def _mix(first: Colour, second: Colour, share: Map | float) -> Colour:
    """`share` of the second colour in the first."""
    share = np.float32(share) if isinstance(share, float) else share
    red, green, blue = (a + (b - a) * share for a, b in zip(first, second, strict=True))
    return red, green, blue
