"""All Triton programs compiled for GPUs that are not here: they fit the chip and keep their numbers in registers.

`make test-triton` runs these tests with the Triton of every supported torch.
"""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from megaclass import triton_launch
from megaclass.backbones.layers import fused_norm, norm_programs
from megaclass.data.augment_gpu import prepare as augmentation
from megaclass.data.augment_gpu import programs as augment_programs
from megaclass.head.faults import MULTIPLIER, NUM_WATCHED
from megaclass.head.gpu import image_programs, kernel_programs, row_programs
from megaclass.head.gpu.tiling import Tiles, tiles_for

# Compilation starts ptxas.
pytestmark = pytest.mark.ranks

MODULES = [augment_programs, image_programs, kernel_programs, norm_programs, row_programs]
# Bytes of shared memory a block may use; registers a multiprocessor has.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS = 65536
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Usage:
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_for(
    capability: int, program: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> Usage:
    """Compiles a program; types and constants that it does not have are left out."""
    names = program.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # As at a real launch: tensors begin at multiples of 16 bytes, and so do their rows.
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name == "plane"]
    source = ASTSource(
        program,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Usage(*_resources(kernel.asm["cubin"]), kernel.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1 and part.split(":")[1].isdigit())
    # What does not fit the registers goes to the stack frame.
    return int(fields["REG"]), int(fields["STACK"]) + int(fields.get("LOCAL", 0))


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
    # The plain program keeps everything in registers. With all options at once, Triton 3.8 keeps six numbers per thread in
    # memory on sm_90, and Triton 3.6 as many of each program on sm_120 and two of the one for float32.
    is_tight = is_plain and capability < 120 and options["dtype"] != "fp32"
    assert usage.spilled_bytes <= (0 if is_tight else 24)
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
    assert compile_for(capability, image_programs.pack_block, types, constants).spilled_bytes == 0
    types = {
        "first_fault": "*i64", "words": "*i64", "norms": "*fp64", "labels": "*i64", "is_image": "*i1",
        "num_overflowed": "*fp64", "step": "*i64", "words_stride": "i32", "num_ranks": "i32", "num_images": "i32",
        "max_batch": "i32", "num_classes": "i32",
    }  # fmt: skip
    assert compile_for(capability, image_programs.note_faults, types, {"BLOCK": 1024}, num_warps=8).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_classes_are_drawn_on_every_supported_gpu(capability: int):
    types = {
        "is_positive": "*u8", "counts": "*i32", "classes": "*i64", "weights": "*fp32", "overflowed": "*fp64",
        "step": "*i64", "key_prefix": "i64", "first_class": "i32", "num_local": "i32", "threshold": "i32",
        "device_threshold": "*i64", "capacity": "i32", "drawn_weight": "fp32",
    }  # fmt: skip
    constants = {"COUNTS_ONLY": False, "BLOCK": 4096}
    assert compile_for(capability, row_programs.draw_classes, types, constants, num_warps=8).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_images_are_listed_by_row_on_every_supported_gpu(capability: int):
    types = {
        "slots": "*i64", "target_rows": "*i64", "keys": "*i64", "heads": "*i32", "links": "*i32", "num_pulls": "i32",
    }  # fmt: skip
    for program, constants in (
        (image_programs.key_pulls, {"M": 3, "BLOCK": 256}),
        (image_programs.link_pulls, {"BLOCK": 256}),
    ):
        assert compile_for(capability, program, types, constants).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_several_labels_are_cleared_on_every_supported_gpu(capability: int):
    types = {
        "exps": "*bf16", "masses": "*fp32", "target_slots": "*i64", "first_slot": "i32", "num_slots": "i32",
        "num_images": "i32", "plane": "i32", "num_labels": "i32",
    }  # fmt: skip
    assert compile_for(capability, kernel_programs.clear_targets, types, {"M": 3, "BLOCK_S": 128}).spilled_bytes == 0


@pytest.mark.parametrize("kind", ["cosine", "angle", "straight-through"])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_margin_is_settled_on_every_supported_gpu(capability: int, kind: str):
    types = {
        "masses": "*fp64", "cosines": "*fp64", "is_image": "*i1", "numbers": "*fp64", "num_total": "*fp64",
        "first_fault": "*i64", "mass_slopes": "*fp64", "slopes": "*fp64", "loss": "*fp32", "num_images": "i32",
    }  # fmt: skip
    constants = {"KIND": kind, "BLOCK": 512}
    assert compile_for(capability, image_programs.finish_losses, types, constants, num_warps=8).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_images_are_prepared_and_weighed_on_every_supported_gpu(capability: int):
    types = {
        "words": "*i64", "rows": "*bf16", "weight": "*fp32", "units": "*fp32", "products": "*bf16", "targets": "*fp32",
        "norms": "*fp64", "cosines": "*fp64", "labels": "*i64", "is_image": "*i1", "target_rows": "*i64", "slots": "*i64",
        "sums": "*fp32", "mass_slopes": "*fp64", "slopes": "*fp64", "upstream": "*fp32", "num_total": "*fp64",
        "negatives": "*fp64", "pulls": "*fp32", "weights": "*fp64", "weighted": "*bf16", "grads": "*fp32", "factor": "fp32",
        "norm_slopes": "*fp64", "out": "*bf16",
    }  # fmt: skip
    types |= dict.fromkeys(("words_stride", "rows_stride", "max_batch", "first_class", "num_local"), "i32")
    sizes = {"D": 512, "BLOCK_D": 512}
    for program, constants in (
        (image_programs.prepare_images, {"WIDTH": 512, "M": 3}),
        (image_programs.weigh_images, {"WIDTH": 512, "WANTS_GRAD": True}),
        (image_programs.embedding_gradients, {"HAS_NORM_SLOPES": True}),
    ):
        assert compile_for(capability, program, types, sizes | constants).spilled_bytes == 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_rows_are_looked_up_on_every_supported_gpu(capability: int):
    types = {"weight": "*fp32", "classes": "*i64", "unit": "*bf16", "labels": "*i64", "is_positive": "*u8"}
    types |= dict.fromkeys(("first_slot", "num_slots", "first_class", "num_local", "num_images", "plane"), "i32")
    constants = {"D": 512, "WIDTH": 512, "M": 2, "IS_SAMPLED": True, "IS_COSINE": True, "BLOCK_R": 8, "BLOCK_D": 512}
    assert compile_for(capability, kernel_programs.unit_centres, types, constants, num_warps=8).spilled_bytes == 0
    assert compile_for(capability, row_programs.mark_positives, types, {"BLOCK": 256}).spilled_bytes == 0


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("is_laden", [False, True], ids=["plain", "laden"])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_batch_norm_fits_every_supported_gpu(capability: int, is_laden: bool, width: int):
    numbers = "partial moments running_mean running_variance weight bias slope sums means"
    images = ["x", "y", "skip", "grad_y", "grad_x", "through"]
    types = dict.fromkeys(numbers.split(), "*fp32") | dict.fromkeys(images, "*bf16")
    types |= {"arrivals": "*i32", "num_batches": "*i64", "num_rows": "i32", "eps": "fp32", "momentum": "fp32"}
    absent = {} if is_laden else dict.fromkeys(("slope", "skip", "through"))
    for program, tile, options in (
        (norm_programs.image_moments, fused_norm._SUM_TILE, fused_norm._SUM_OPTIONS),
        (norm_programs.normalise, fused_norm._MAP_TILE, fused_norm._MAP_OPTIONS),
        (norm_programs.sum_gradients, fused_norm._SUM_TILE, fused_norm._SUM_OPTIONS),
        (norm_programs.spread_gradients, fused_norm._MAP_TILE, fused_norm._MAP_OPTIONS),
    ):
        constants = {**absent, "C": width, "ROWS": tile // width, "STAGES": fused_norm._STAGES}
        constants["K"] = 3 if is_laden else 2
        usage = compile_for(capability, program, types, constants, **options)
        # A division in float64 is a call, which may keep a register or two on the stack.
        assert usage.spilled_bytes <= 32
        # As many programs share a multiprocessor's registers, and its shared memory, of which some GPUs have 99 KiB.
        at_once = fused_norm._PROGRAMS_PER_MULTIPROCESSOR
        assert at_once * options["num_warps"] * 32 * usage.registers <= REGISTERS
        assert at_once * usage.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("operations", [(), (1, 4, 9)], ids=["none", "crop, low_resolution, jpeg"])
def test_batches_are_prepared_on_old_and_new_gpus(capability: int, operations: tuple[int, ...]):
    types = {"pixels": "*u8", "out": "*fp32", "indices": "*i64", "keys": "*i64", "shares": "*fp32", "scratch": "*fp32"}
    types |= {"small_sizes": "*i32", "tables": "*fp32"} | dict.fromkeys(("step", "epoch"), "i32")
    types |= dict.fromkeys(("stride_b", "stride_c", "stride_h", "stride_w"), "i32")
    packed = sum(number << (4 * place) for place, number in enumerate(operations))
    constants = {"H": 112, "W": 112, "OPERATIONS": packed, "COUNT": len(operations), "PICK": len(operations) // 2}
    constants |= {"MIRROR": True, "BLOCK": augmentation._BLOCK}
    num_warps = augmentation._NUM_WARPS
    program = augment_programs.prepare_images
    usage = compile_for(capability, program, types, constants, num_warps=num_warps, num_stages=1)
    # At least two programs share a multiprocessor, so one computes while another reads.
    assert usage.spilled_bytes == 0 and 2 * num_warps * 32 * usage.registers <= REGISTERS


def test_every_program_is_compiled_above():
    """A program is a function for the GPU that no other one calls."""
    functions = [one for module in MODULES for one in vars(module).values() if isinstance(one, triton.JITFunction)]
    sources = "".join({one.src for one in functions})
    programs = {one for one in functions if sources.count(f"{one.__name__}(") == sources.count(f"def {one.__name__}(")}
    assert len(programs) > 15
    text = Path(__file__).read_text()
    assert [one.__name__ for one in programs if f"programs.{one.__name__}" not in text] == []


class Gpu:
    """A driver of Triton for a Hopper GPU on which nothing can be started."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def test_what_stands_for_tensors_while_programs_are_compiled_ahead_leads_to_the_same_program(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Gpu())
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["key"]))
    weight, unit = torch.zeros(101, 48), torch.zeros(128, 64, dtype=torch.bfloat16)
    constants = {"D": 48, "WIDTH": 64, "M": 1, "IS_SAMPLED": False, "IS_COSINE": True, "BLOCK_R": 64, "BLOCK_D": 64}
    for first in (weight, weight[1:], weight.flatten()[1:]):
        for kind in (lambda tensor: tensor, triton_launch._type_of):
            arguments = (kind(first), None, kind(unit), 0, 100, 100, 128)
            kernel_programs.unit_centres.warmup(*arguments, grid=(1,), **constants, num_warps=8)
    # Two: for tensors that begin at a multiple of 16 bytes, and for others.
    assert len(compiled) == 2
    described = triton_launch._type_of(TensorDescriptor.from_tensor(unit, [16, 64]))
    assert isinstance(described, TensorDescriptor) and described.base.dtype == torch.bfloat16


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
        capability, kernel_programs.exponentials, types, constants, num_warps=tiles.warps, num_stages=tiles.stages
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
    return compile_for(capability, row_programs.update_rows, types, constants, num_warps=2)
