"""Triton programs compiled for GPUs that are not here, and what they would use of them."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Usage:
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_for(
    capability: int, program: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> Usage:
    names = program.arg_names
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
