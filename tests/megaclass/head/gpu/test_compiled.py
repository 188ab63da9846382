"""The Triton programs compiled for GPUs that are not here: they fit the chip and spill no registers."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.compiled_programs import Usage, compile_for

from megaclass.head.faults import MULTIPLIER, NUM_WATCHED
from megaclass.head.gpu import image_programs as triton_images
from megaclass.head.gpu import kernel_programs as triton_programs
from megaclass.head.gpu import row_programs as triton_rows
from megaclass.head.gpu.tiling import Tiles, tiles_for

# Compilation starts ptxas.
pytestmark = pytest.mark.ranks

# Bytes of shared memory a block may use; registers a multiprocessor has.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS = 65536
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "fp32"},
        {"has_weights": True, "has_filter": True, "is_curricular": True},
        {"num_subcentres": 3},
        {"has_tile_sums": True},
        {"has_tile_sums": True, "has_weights": True},
    ],
    ids=["plain", "float32", "laden", "sub-centres", "labels", "labels, laden"],
)
def test_exponentials_fit_every_supported_gpu(capability: int, options: dict[str, Any]):
    options = {"has_weights": False, "dtype": "bf16", **options}
    major_minor = divmod(capability, 10)
    is_plain = not any(options.get(name) for name in ("has_weights", "has_filter", "is_curricular"))
    tiles = tiles_for(major_minor, DTYPES[options["dtype"]], options.get("num_subcentres", 1), is_plain=is_plain)
    usage = exponentials_usage(capability, tiles, **options)
    assert usage.spilled_bytes == 0
    assert usage.shared_bytes * tiles.programs_per_sm <= SHARED_BYTES[capability]
    assert usage.registers * tiles.warps * 32 * tiles.programs_per_sm <= REGISTERS


# Each optimizer on each GPU, and both of them with and without measures.
@pytest.mark.parametrize(
    ("capability", "storage", "kind", "is_measured"),
    [
        (capability, storage, kind, (row + column) % 2 == 0)
        for row, capability in enumerate(SHARED_BYTES)
        for column, (storage, kind) in enumerate([("fp32", "sgd"), ("bf16", "adamw"), ("bf16", "adagrad")])
    ],
)
def test_the_update_of_the_centres_is_light(capability: int, storage: str, kind: str, is_measured: bool):
    # The unmeasured ones are those of inner products.
    usage = update_usage(capability, storage=storage, kind=kind, is_measured=is_measured, is_cosine=is_measured)
    assert usage.spilled_bytes == 0
    assert usage.registers <= 128


@pytest.mark.parametrize("bits", ["i16", "i32"], ids=["bf16", "float32"])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_control_word_is_formed_and_judged_on_every_supported_gpu(capability: int, bits: str):
    types = {
        "words": "*i64", "rows": "*bf16", "embeddings": "*bf16", "labels": "*i64", "watched": f"*{bits}",
        "kept": f"*{bits}", "step": "*i64", "count": "i32", "stride": "i32", "watched_stride": "i64", "num_watched": "i32",
        "max_batch": "i32",
    }  # fmt: skip
    constants = {"D": 512, "BLOCK_D": 512, "LANES": NUM_WATCHED, "MULTIPLIER": MULTIPLIER}
    assert compile_for(capability, triton_images.pack_block, types, constants).spilled_bytes == 0
    types = {
        "first_fault": "*i64", "words": "*i64", "norms": "*fp64", "labels": "*i64", "is_image": "*i1",
        "num_overflowed": "*fp64", "step": "*i64", "words_stride": "i32", "num_ranks": "i32", "num_images": "i32",
        "max_batch": "i32", "num_classes": "i32",
    }  # fmt: skip
    assert compile_for(capability, triton_images.note_faults, types, {"BLOCK": 1024}, num_warps=8).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_classes_are_drawn_on_every_supported_gpu(capability: int):
    types = {
        "is_positive": "*u8", "counts": "*i32", "classes": "*i64", "weights": "*fp32", "overflowed": "*fp64",
        "step": "*i64", "key_prefix": "i64", "first_class": "i32", "num_local": "i32", "threshold": "i32",
        "device_threshold": "*i64", "capacity": "i32", "drawn_weight": "fp32",
    }  # fmt: skip
    constants = {"COUNTS_ONLY": False, "BLOCK": 4096}
    assert compile_for(capability, triton_rows.draw_classes, types, constants, num_warps=8).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_images_are_listed_by_row_on_every_supported_gpu(capability: int):
    types = {
        "slots": "*i64", "target_rows": "*i64", "keys": "*i64", "heads": "*i32", "links": "*i32", "num_pulls": "i32",
    }  # fmt: skip
    for program, constants in (
        (triton_images.key_pulls, {"M": 3, "BLOCK": 256}),
        (triton_images.link_pulls, {"BLOCK": 256}),
    ):
        assert compile_for(capability, program, types, constants).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_several_labels_are_cleared_on_every_supported_gpu(capability: int):
    types = {
        "exps": "*bf16", "masses": "*fp32", "target_slots": "*i64", "first_slot": "i32", "num_slots": "i32",
        "num_images": "i32", "plane": "i32", "num_labels": "i32",
    }  # fmt: skip
    assert compile_for(capability, triton_programs.clear_targets, types, {"M": 3, "BLOCK_S": 128}).spilled_bytes == 0


@pytest.mark.parametrize("kind", ["cosine", "angle", "straight-through"])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_margin_is_settled_on_every_supported_gpu(capability: int, kind: str):
    types = {
        "masses": "*fp64", "cosines": "*fp64", "is_image": "*i1", "numbers": "*fp64", "num_total": "*fp64",
        "first_fault": "*i64", "mass_slopes": "*fp64", "slopes": "*fp64", "loss": "*fp32", "num_images": "i32",
    }  # fmt: skip
    constants = {"KIND": kind, "BLOCK": 512}
    assert compile_for(capability, triton_images.finish_losses, types, constants, num_warps=8).spilled_bytes == 0


def exponentials_usage(
    capability: int, tiles: Tiles, *, dtype: str = "bf16", num_subcentres: int = 1, is_curricular: bool = False,
    has_weights: bool = True, has_filter: bool = False, width: int = 512, has_tile_sums: bool = False,
) -> Usage:  # fmt: skip
    exp_dtype, by_descriptor = "bf16" if dtype == "fp16" else dtype, capability >= 90

    def operand(kind: str, height: int, width: int) -> str:
        return f"tensordesc<{kind}[{height}, {width}]>" if by_descriptor else f"*{kind}"

    types = {
        "images": operand(dtype, tiles.images, tiles.width),
        "centres": operand(dtype, tiles.classes, tiles.width),
        "exps": operand(exp_dtype, tiles.images, tiles.classes // tiles.parts),
        "masses": "*fp32", "won": "*i32", "target_slots": "*i64", "class_weights": "*fp32", "num_drawn": "*i32",
        "has_direction": "*i1",
        "borders": "*fp32", "hardness": "*fp32", "first_slot": "i32", "num_slots": "i32", "num_images": "i32",
        "plane": "i32", "scale_log2": "fp32", "shift_log2": "fp32", "filter_above": "fp32",
    }  # fmt: skip
    constants = {
        "WIDTH": width, "M": num_subcentres, "HAS_FILTER": has_filter,
        "IS_CURRICULAR": is_curricular, "HAS_TILE_SUMS": has_tile_sums,
        "BLOCK_G": tiles.images, "BLOCK_S": tiles.classes, "BLOCK_D": tiles.width,
        "SPLITS": 16, "FLATTEN": tiles.flatten, "PARTS": tiles.parts, "BY_DESCRIPTOR": by_descriptor,
    }  # fmt: skip
    for name, is_used in (
        ("won", num_subcentres > 1),
        ("has_direction", num_subcentres > 1),
        ("class_weights", has_weights),
        ("borders", is_curricular),
        ("hardness", is_curricular),
    ):
        if not is_used:
            constants[name] = None
    return compile_for(
        capability, triton_programs.exponentials, types, constants, num_warps=tiles.warps, num_stages=tiles.stages
    )


def update_usage(
    capability: int, *, storage: str = "fp32", kind: str = "sgd", is_measured: bool = False, is_cosine: bool = True
) -> Usage:  # fmt: skip
    types = {
        "weight": f"*{storage}", "state_1": f"*{storage}", "state_2": f"*{storage}", "counts": "*i32", "grad": "*bf16",
        "classes": "*i64", "pull_heads": "*i32", "pull_links": "*i32", "pull_images": "*fp32", "pull_weights": "*fp32",
        "grad_squares": "*fp32", "first_fault": "*i64", "step": "*i64", "factors": "*fp32", "key_prefix": "i64",
        "first_row": "i32", "num_rows": "i32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "won": None, "NUM_LOCAL": 100_000_000, "FIRST_ID": 0, "D": 512, "GRAD_STRIDE": 512, "M": 1,
        "IS_COSINE": is_cosine, "KIND": kind,
        "WEIGHT_DECAY": 5e-4, "CLIP_VALUE": 1.0, "CLIP_ROW_NORM": 1.0, "BETA_1": 0.9, "BETA_2": 0.999,
        "LOG2_BETA_1": -0.152, "LOG2_BETA_2": -0.00144, "EPS": 1e-8,
        "BLOCK_R": 1, "BLOCK_D": 512,
    }  # fmt: skip
    if not is_measured:
        constants["grad_squares"] = None
    return compile_for(capability, triton_rows.update_rows, types, constants, num_warps=2)
