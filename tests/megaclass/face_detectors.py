"""Tiny ONNX detectors that find red squares, in the layouts of SCRFD and of RetinaFace.

Each cell of a grid scores how red it is; boxes and landmarks are the same offsets for every cell, so where the face must be
found follows from where the square is painted.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Box of 64 x 80 pixels around its cell, and landmarks in it, in the pixels that the detector sees.
BOX = np.array([32.0, 40.0, 32.0, 40.0])
POINTS = np.array([[-12.0, -10.0], [13.0, -11.0], [1.0, 4.0], [-9.0, 18.0], [11.0, 17.0]])
STRIDES = (8, 16, 32)
_PRIORS = {8: (16, 32), 16: (64, 128), 32: (256, 512)}


def write_scrfd(path: Path, side: int | str = "side") -> Path:
    """Only the grid of stride 16 ever finds something; its first anchor alone, as real detectors prefer one of the two."""
    nodes, outputs, constants = [], {}, []
    for stride in STRIDES:
        nodes += _redness(stride, "r")
        outputs[f"score_{stride}"] = 1
        nodes += _rows(f"score_{stride}", f"red_{stride}", np.array([[1.0], [0.0]]) * (stride == 16), constants)
    for stride in STRIDES:
        outputs[f"bbox_{stride}"] = 4
        nodes += _rows(f"bbox_{stride}", f"one_{stride}", np.tile(BOX / stride, (2, 1)), constants)
    for stride in STRIDES:
        outputs[f"kps_{stride}"] = 10
        nodes += _rows(f"kps_{stride}", f"one_{stride}", np.tile(POINTS.ravel() / stride, (2, 1)), constants)
    return _save(path, nodes, constants, outputs, side, lambda columns: ["n", columns])


def write_retinaface(path: Path, side: int | str = "side") -> Path:
    nodes, constants = [], []
    parts: dict[str, list[str]] = {"loc": [], "conf": [], "landms": []}
    for stride in STRIDES:
        nodes += _redness(stride, "r_raw")
        # The second prior of each cell never wins, and none but those of stride 16.
        sides = np.array(_PRIORS[stride], dtype=float)
        # Cells have their centre half a stride further than SCRFD's.
        half = stride / 2
        places = np.array([[(BOX[2] - BOX[0]) / 2 - half, (BOX[3] - BOX[1]) / 2 - half]] * 2) / (0.1 * sides[:, None])
        sizes = np.log(np.array([BOX[0] + BOX[2], BOX[1] + BOX[3]])[None] / sides[:, None]) / 0.2
        points = ((POINTS - half).ravel()[None] / (0.1 * sides[:, None])).reshape(2, 10)
        nodes += _rows(f"l_{stride}", f"one_{stride}", np.hstack([places, sizes]), constants)
        nodes += _rows(f"p_{stride}", f"one_{stride}", points, constants)
        first = np.array([[0.0, 1.0], [0.0, 0.0]]) * (stride == 16)
        nodes += _rows(f"c_{stride}", f"red_{stride}", first, constants)
        for kind, name in (("loc", "l"), ("conf", "c"), ("landms", "p")):
            parts[kind].append(f"{name}_{stride}")
    constants.append(numpy_helper.from_array(np.array([0], dtype=np.int64), "axis0"))
    for kind, names in parts.items():
        nodes.append(helper.make_node("Concat", names, [f"{kind}_flat"], axis=0))
        nodes.append(helper.make_node("Unsqueeze", [f"{kind}_flat", "axis0"], [kind]))
    return _save(path, nodes, constants, {"loc": 4, "conf": 2, "landms": 10}, side, lambda columns: [1, "n", columns])


def _redness(stride: int, red: str):
    """red_S (cells, 1, 1): 1 where the cell is pure red, 0 where it is grey; one_S: ones of the same shape."""
    return [
        helper.make_node("AveragePool", ["input"], [f"mean_{stride}"], kernel_shape=[stride] * 2, strides=[stride] * 2),
        helper.make_node("Conv", [f"mean_{stride}", red], [f"raw_{stride}"]),
        helper.make_node("Add", [f"raw_{stride}", f"{red}_shift"], [f"shifted_{stride}"]),
        helper.make_node("Relu", [f"shifted_{stride}"], [f"map_{stride}"]),
        helper.make_node("Reshape", [f"map_{stride}", "column"], [f"red_{stride}"]),
        helper.make_node("Mul", [f"red_{stride}", "zero"], [f"nought_{stride}"]),
        helper.make_node("Add", [f"nought_{stride}", "one"], [f"one_{stride}"]),
    ]


def _rows(name: str, source: str, values_2K: np.ndarray, constants: list):
    """Output rows: every cell times the values of its two anchors."""
    columns = values_2K.shape[1]
    constants.append(numpy_helper.from_array(values_2K.astype(np.float32)[None], f"{name}_values"))
    constants.append(numpy_helper.from_array(np.array([-1, columns], dtype=np.int64), f"{name}_shape"))
    return [
        helper.make_node("Mul", [source, f"{name}_values"], [f"{name}_both"]),
        helper.make_node("Reshape", [f"{name}_both", f"{name}_shape"], [name]),
    ]


def _save(path: Path, nodes, constants, outputs: dict[str, int], side, shape) -> Path:
    # RGB in SCRFD's scale: (red - green) / 2 is 1 for pure red; BGR less its mean: (red - green + mean) / 255.
    weights = {
        "r": np.array([128 / 255, -128 / 255, 0]).reshape(1, 3, 1, 1),
        "r_shift": np.zeros(1),
        "r_raw": np.array([0, -1 / 255, 1 / 255]).reshape(1, 3, 1, 1),
        "r_raw_shift": np.array([(123.0 - 117.0) / 255]),
        "zero": np.zeros(1),
        "one": np.ones(1),
    }
    used = {name for node in nodes for name in node.input}
    constants += [numpy_helper.from_array(v.astype(np.float32), name) for name, v in weights.items() if name in used]
    constants.append(numpy_helper.from_array(np.array([-1, 1, 1], dtype=np.int64), "column"))
    graph = helper.make_graph(
        nodes,
        "red_squares",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, side, side])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape(columns)) for name, columns in outputs.items()],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
