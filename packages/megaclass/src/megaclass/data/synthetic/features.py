"""Features of a synthetic face, layer by layer from the front: glasses, hair, brows, eyes, nose, mouth, marks, skin."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaclass.data.synthetic.layers import Canvas, Colour, Layers, Map, Values, fixed, mix, photograph, steps, tone

_SKIN_LIGHT = (0.97, 0.80, 0.68)
_SKIN_DARK = (0.45, 0.28, 0.19)
_LIP = (0.72, 0.22, 0.25)
_DARK = (0.07, 0.05, 0.06)
_WHITE = (0.96, 0.96, 0.95)
# Few tones shared by many identities: a colour narrows the search but never identifies a person.
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

# Shares of the identities that have a feature (the last one: of the images).
SHARE_BALD = 0.10
SHARE_CHEEKS = 0.30
SHARE_BEARD = 0.25
SHARE_MOUSTACHE = 0.22
SHARE_MOLE = 0.45
SHARE_SCAR = 0.15
SHARE_GLASSES = 0.35
SHARE_OCCLUDED = 0.25


@dataclass
class Head:
    """Positions of all pixels: (x, y) in the plane of the head, (u, v) on its turned surface, z towards the viewer.

    `side` is |u|, so features in pairs are drawn once. `inside` is the coverage of the head.
    """

    x: Map
    y: Map
    z: Map
    u: Map
    v: Map
    side: Map
    inside: Map


def paint(canvas: Canvas, person: Values, scene: Values, noise_seed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Returns RGB (B, H, W, 3) of the given people in the given scenes."""
    layers = Layers(len(noise_seed), canvas.size, pixels_per_unit=scene["scale"] * np.float32(canvas.size / 2))
    head = _place(canvas, layers, person, scene)
    skin = mix(
        fixed(_SKIN_LIGHT, person["skin_tone"]),
        fixed(_SKIN_DARK, person["skin_tone"]),
        steps(person["skin_tone"], 4),
    )
    hair = _hair_colour(person, skin)

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
    return photograph(layers.image_B3HW, (head.x, head.y, head.z), scene, noise_seed)


def _place(canvas: Canvas, layers: Layers, person: Values, scene: Values) -> Head:
    cos_roll, sin_roll = np.cos(scene["roll"]), np.sin(scene["roll"])
    x_frame = (canvas.x_1HW - scene["place_x"]) / scene["scale"]
    y_frame = (canvas.y_1HW - scene["place_y"]) / scene["scale"]
    x = cos_roll * x_frame + sin_roll * y_frame
    y = cos_roll * y_frame - sin_roll * x_frame

    width = person["head_width"]
    across = x / width
    across_squared = across * across
    y_squared = y * y
    # The head is an ellipsoid: turning it moves points near the viewer and keeps the outline.
    z = np.sqrt(np.maximum(1 - across_squared - 0.75 * y_squared, 0))
    u = (across * np.cos(scene["yaw"]) - z * np.sin(scene["yaw"])) * width
    v = y - z * np.sin(scene["pitch"])

    lower = np.maximum(y, 0)
    narrowing = 1 - person["jaw_taper"] * lower * lower
    across_squared /= narrowing * narrowing
    square = np.where(y > 0, person["jaw_square"], person["crown_square"])
    outline = across_squared + y_squared - square * across_squared * np.minimum(y_squared, 1)
    distance = (np.sqrt(np.maximum(outline, 0)) - 1) * width
    return Head(x, y, z, u, v, np.abs(u), layers.coverage(distance))


def _occluder(layers: Layers, head: Head, scene: Values) -> None:
    """Draws a blob in front of the edge of the face, like a hand, a branch or a shoulder."""
    along = head.x - np.cos(scene["occluder_angle"]) * scene["occluder_distance"]
    down = (head.y - np.sin(scene["occluder_angle"]) * scene["occluder_distance"]) * scene["occluder_stretch"]
    cover = layers.coverage(np.sqrt(along * along + down * down) - scene["occluder_size"])
    cover *= scene["occluder_draw"] < SHARE_OCCLUDED
    layers.put(cover, (scene["occluder_red"], scene["occluder_green"], scene["occluder_blue"]))


def _glasses(layers: Layers, head: Head, person: Values, scene: Values) -> None:
    present = person["glasses_draw"] < SHARE_GLASSES
    thickness = person["glasses_thickness"]
    rise = head.v - (person["eye_v"] + 0.02)
    lens_u = np.maximum(person["eye_u"], person["glasses_width"] + 0.05)
    across = (head.side - lens_u) / person["glasses_width"]
    down = rise / person["glasses_height"]
    across *= across
    down *= down
    outline = across + down - person["glasses_square"] * np.minimum(across, 1) * np.minimum(down, 1)
    lens = (np.sqrt(np.maximum(outline, 0)) - 1) * np.minimum(person["glasses_width"], person["glasses_height"])
    bar = np.abs(rise) - thickness
    outside_lenses = np.abs(head.side - lens_u) - person["glasses_width"]
    frame = np.minimum(np.abs(lens) - thickness, np.maximum(bar, -outside_lenses))
    cover = layers.coverage(frame)
    cover *= present
    cover *= head.inside
    layers.put(cover, tone(_GLASSES_TONES, person["glasses_tone"]))

    glare = layers.coverage(lens)
    glare *= present * np.maximum(scene["glare"], 0) * 0.8
    layers.put(glare, fixed(_WHITE, scene["glare"]))


def _fringe(layers: Layers, head: Head, person: Values, hair: Colour) -> None:
    offset = head.u - person["hairline_part"]
    wave = np.sin(head.u * (person["hair_wave_count"] * np.float32(np.pi))) * person["hair_wave"]
    line = (
        person["hairline_v"]
        - person["hairline_curve"] * offset * offset
        + person["hairline_slope"] * np.abs(offset)
        + wave
    )
    # Hair always stays above the eyes, which carry most of the identity.
    ceiling = person["eye_v"] - person["brow_gap"] - 0.12 + 0.9 * np.maximum(head.side - 0.5, 0)
    cover = layers.coverage(head.v - np.minimum(line, ceiling))
    cover *= layers.coverage(_hair_outline(head, person))
    cover *= person["bald_draw"] >= SHARE_BALD
    layers.put(cover, hair)


def _hair_outline(head: Head, person: Values) -> Map:
    across = head.x / (person["head_width"] * person["hair_volume"])
    down = (head.y + 0.05) / person["hair_volume"]
    return np.asarray((np.sqrt(across * across + down * down) - 1) * person["head_width"])


def _brows(layers: Layers, head: Head, person: Values, scene: Values, hair: Colour) -> None:
    along = head.side - person["eye_u"]
    bend = along * along
    height = person["eye_v"] - person["eye_height"] - person["brow_gap"] - scene["brow_raise"]
    middle = height + person["brow_tilt"] * along + person["brow_arch"] * bend
    thickness = person["brow_thickness"] * (1.15 - 0.6 * bend / (person["brow_length"] * person["brow_length"]))
    distance = np.maximum(np.abs(head.v - middle) - thickness, np.abs(along) - person["brow_length"])
    cover = layers.coverage(distance)
    cover *= head.inside
    layers.put(cover, mix(hair, fixed(_DARK, hair[0]), 0.45))


def _eyes(layers: Layers, head: Head, person: Values, scene: Values, skin: Colour) -> None:
    along = head.side - person["eye_u"]
    down = head.v - person["eye_v"] - person["eye_tilt"] * along
    reach = along / person["eye_width"]
    opening = 1 - reach * reach
    opening *= person["eye_height"] * scene["eye_open"]
    lens = np.abs(down) - opening
    eye = layers.coverage(lens.copy())
    eye *= head.inside
    # Both eyes look in the same direction, so the gaze is not mirrored.
    aside = along - scene["gaze_u"] * np.sign(head.u)
    down = down - scene["gaze_v"]
    from_centre = np.sqrt(aside * aside + down * down)
    pupil = layers.coverage(from_centre - person["iris_size"] * 0.5)
    pupil *= eye
    layers.put(pupil, fixed(_DARK, person["iris_size"]))
    iris = layers.coverage(from_centre - person["iris_size"])
    iris *= eye
    layers.put(iris, tone(_IRIS_TONES, person["iris_tone"]))
    layers.put(eye, fixed(_WHITE, person["iris_size"]))
    lid = layers.coverage(lens - 0.03)
    lid *= head.inside
    layers.put(lid, mix(skin, fixed(_DARK, skin[0]), 0.75))


def _nose(layers: Layers, head: Head, person: Values, skin: Colour) -> None:
    # The nose is in front of the face, so turning the head moves it further than the eyes.
    side = np.abs(head.u - (head.u - head.x) * -0.25)
    top = person["eye_v"] - 0.02
    tip = top + person["nose_length"]
    down = (head.v - top) / person["nose_length"]
    half_width = person["nose_bridge"] + (person["nose_width"] - person["nose_bridge"]) * down * down
    nostril_u = (side - person["nose_width"] * 0.55) * 0.8
    nostril_v = head.v - tip + 0.01
    nostrils = layers.coverage(np.sqrt(nostril_u * nostril_u + nostril_v * nostril_v) - person["nostril_size"])
    layers.put(nostrils, mix(skin, fixed(_DARK, skin[0]), 0.8))
    ends = np.maximum(head.v - tip - 0.05, top - head.v)
    body = np.maximum(side - half_width, ends)
    inner = layers.coverage(body + 0.045)
    layers.put(inner, mix(skin, fixed(_WHITE, skin[0]), 0.12))
    edge = layers.coverage(body)
    edge *= np.clip(down, 0, 1)
    layers.put(edge, mix(skin, fixed(_DARK, skin[0]), 0.42))


def _mouth(layers: Layers, head: Head, person: Values, scene: Values, skin: Colour) -> None:
    reach = head.u / person["mouth_width"]
    reach *= reach
    centre = person["eye_v"] + person["nose_length"] + person["mouth_v"]
    down = head.v - centre + (person["mouth_curve"] + scene["smile"]) * (reach - 0.4)
    arch = 1 - reach
    gap = np.maximum(scene["mouth_open"], 0) + 0.014
    inner = np.abs(down) - gap * arch
    hole = layers.coverage(inner)
    layers.put(hole, mix(fixed(_DARK, skin[0]), fixed(_LIP, skin[0]), 0.2))
    upper = -down - (person["lip_upper"] + gap) * arch
    lower = down - (person["lip_lower"] + gap) * arch
    lips = layers.coverage(np.maximum(upper, lower))
    layers.put(lips, mix(skin, fixed(_LIP, skin[0]), 0.45 + 0.4 * steps(person["lip_tone"], 3)))


def _marks(layers: Layers, head: Head, person: Values, skin: Colour) -> None:
    dark_skin = mix(skin, fixed(_DARK, skin[0]), 0.7)
    for mole in ("mole_a", "mole_b"):
        across, down = head.u - person[f"{mole}_u"], head.v - person[f"{mole}_v"]
        cover = layers.coverage(np.sqrt(across * across + down * down) - person[f"{mole}_size"])
        cover *= person[f"{mole}_draw"] < SHARE_MOLE
        cover *= head.inside
        layers.put(cover, dark_skin)
    across, down = head.u - person["scar_u"], head.v - person["scar_v"]
    slope = person["scar_slope"]
    line = np.abs(down - slope * across) / np.sqrt(1 + slope * slope)
    scar = layers.coverage(np.maximum(line - 0.022, np.abs(across) + np.abs(down) - 0.24))
    scar *= person["scar_draw"] < SHARE_SCAR
    scar *= head.inside
    layers.put(scar, mix(skin, fixed(_LIP, skin[0]), 0.6))
    across, down = head.side - person["cheek_u"], head.v - person["cheek_v"]
    cheeks = layers.coverage(np.sqrt(across * across + down * down) - 0.14, softness=4.0)
    cheeks *= (person["cheek_draw"] < SHARE_CHEEKS) * np.float32(0.4)
    cheeks *= head.inside
    layers.put(cheeks, fixed(_LIP, skin[0]))


def _beard(layers: Layers, head: Head, person: Values, hair: Colour, skin: Colour) -> None:
    mouth_v = person["eye_v"] + person["nose_length"] + person["mouth_v"]
    reach = head.u / person["moustache_width"]
    lift = mouth_v - person["lip_upper"] - 0.05 + 0.08 * reach * reach
    arch = person["moustache_height"] * (1 - reach * reach)
    moustache = layers.coverage(np.abs(head.v - lift) - arch)
    moustache *= person["moustache_draw"] < SHARE_MOUSTACHE
    layers.put(moustache, hair)
    edge = np.maximum(person["beard_v"], person["eye_v"] + person["nose_length"] + 0.05)
    beard = layers.coverage(edge - person["beard_curve"] * (head.u * head.u) - head.v, softness=2.0)
    beard *= (person["beard_draw"] < SHARE_BEARD) * np.float32(0.8)
    beard *= head.inside
    layers.put(beard, mix(hair, skin, 0.15))


def _skin_and_ears(layers: Layers, head: Head, person: Values, skin: Colour) -> None:
    layers.put(head.inside.copy(), skin)
    across = (np.abs(head.x) - person["head_width"]) / (person["ear_size"] * 0.6)
    down = (head.y - person["ear_v"]) / person["ear_size"]
    ears = layers.coverage((np.sqrt(across * across + down * down) - 1) * person["ear_size"])
    # Long hair falls over the ears.
    ears *= person["hair_length"] < 0.35
    layers.put(ears, mix(skin, fixed(_DARK, skin[0]), 0.15))


def _hair_behind(layers: Layers, head: Head, person: Values, hair: Colour) -> None:
    cap = np.maximum(_hair_outline(head, person), head.y - person["hair_length"])
    fall = np.abs(head.x) - person["head_width"] * person["hair_volume"] * 0.97
    fall = np.maximum(fall, np.maximum(-0.1 - head.y, head.y - person["hair_length"]))
    cover = layers.coverage(np.minimum(cap, fall))
    cover *= person["bald_draw"] >= SHARE_BALD
    layers.put(cover, mix(hair, fixed(_DARK, hair[0]), 0.25))


def _clothes(layers: Layers, head: Head, scene: Values, skin: Colour) -> None:
    clothes = layers.coverage(1.12 + 0.12 * head.x * head.x - head.y)
    layers.put(clothes, (scene["clothes_red"], scene["clothes_green"], scene["clothes_blue"]))
    neck = layers.coverage(np.maximum(np.abs(head.x) - 0.36, 0.5 - head.y))
    layers.put(neck, mix(skin, fixed(_DARK, skin[0]), 0.25))


def _background(layers: Layers, canvas: Canvas, scene: Values) -> None:
    along = np.cos(scene["back_angle"]) * canvas.x_1HW + np.sin(scene["back_angle"]) * canvas.y_1HW
    stripes = np.sin(along * scene["back_frequency"] + scene["back_phase"]) * 0.5
    stripes += 0.5
    layers.put(stripes, (scene["back_a_red"], scene["back_a_green"], scene["back_a_blue"]))
    layers.put(np.ones_like(stripes), (scene["back_b_red"], scene["back_b_green"], scene["back_b_blue"]))


def _hair_colour(person: Values, skin: Colour) -> Colour:
    """Returns one of the tones, darkened if it is close to the skin's."""
    hair = tone(_HAIR_TONES, person["hair_tone"])
    difference = np.maximum(np.abs(hair[0] - skin[0]), np.abs(hair[2] - skin[2]))
    return mix(hair, fixed(_DARK, hair[0]), (difference < np.float32(0.25)) * np.float32(0.7))
