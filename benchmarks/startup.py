"""Start-up of a training run: seconds from the start of the process to the end of its first step, by phase.

    python benchmarks/startup.py [--backbone iresnet50] [--device cuda]

Each run is a process of its own: cold, with empty caches of Triton and torch.compile, and warm, with those that the cold one
has left. The phases are those of `megaclass train`. A run before both writes the bytecode of all packages, which `pip install`
does elsewhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 512


def child(backbone: str, device_name: str, data: str, begun: float) -> None:
    phases: dict[str, float] = {}
    last = begun

    def done(name: str) -> None:
        nonlocal last
        now = time.time()
        phases[name] = now - last
        last = now

    done("interpreter")
    import torch

    done("import torch")
    from megaclass.config.read import load_config_values
    from megaclass.training import loop as loop
    from megaclass.training import rank_main as rank_main
    from megaclass.training.model.build import build_model
    from megaclass.training.run.run import open_data
    from megaclass.training.step import compile_programs, training_step
    from megaclass_launch.ranks.process_group import process_group
    from megaclass_launch.world import World

    done("import megaclass")
    batch_size = BATCH if device_name == "cuda" else 32
    tables = {
        "data": {"path": data},
        "backbone": {"name": backbone},
        "train": {"run_dir": "unused", "global_batch": batch_size, "device": device_name},
    }
    config = load_config_values(tables, where="benchmark")
    if device_name == "cuda":
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        done("CUDA context")
    with process_group(World(), device=device_name) as device:
        done("process group")
        source, loader = open_data(config, World(), device)
        done("open the data")
        model = build_model(config, source, World(), device)
        model.parallel.train()
        synchronise(device_name)
        done("build the model")
        batches = loader.batches(num_steps=50)
        batch = next(batches)
        synchronise(device_name)
        done("first batch")
        num_threads = len(os.sched_getaffinity(0))
        compile_programs(model, batch, config, step=0, device=device, num_threads=num_threads)
        synchronise(device_name)
        done("compile programs")
        for name in ("first step", "second step", "third step"):
            training_step(model, batch, config, lr=0.001, step=0, device=device)
            synchronise(device_name)
            done(name)
        batches.close()  # type: ignore[attr-defined]
    print(json.dumps(phases))


def synchronise(device_name: str) -> None:
    import torch

    if device_name == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="iresnet50")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.backbone, options.device, options.child[0], float(options.child[1]))
        return
    from megaclass.data.tools.synthesize import synthesize

    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        synthesize(data, num_identities=256, images_per_identity=8, image_size=112, num_pairs=20)
        environment = os.environ | {"PYTHONPYCACHEPREFIX": f"{scratch}/bytecode"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, __file__, "--backbone", options.backbone, "--device", options.device]
        found = {}
        for kind, caches in (("bytecode", "first"), ("cold", "second"), ("warm", "second")):
            environment |= {
                "TRITON_CACHE_DIR": f"{scratch}/{caches}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/{caches}/inductor",
                "CUDA_CACHE_PATH": f"{scratch}/{caches}/cuda",
            }
            begun = time.time()
            child_command = [*command, "--child", str(data), str(begun)]
            out = subprocess.run(child_command, check=True, stdout=subprocess.PIPE, env=environment).stdout
            found[kind] = json.loads(out.splitlines()[-1]) | {"whole process": time.time() - begun}
        del found["bytecode"]
    print("| phase | cold s | warm s |\n|---|---|---|")
    for name in found["cold"]:
        print(f"| {name} | {found['cold'][name]:.2f} | {found['warm'][name]:.2f} |")
    for kind, phases in found.items():
        to_first = sum(
            value for name, value in phases.items() if name not in ("second step", "third step", "whole process")
        )
        print(f"{kind} start to the end of the first step: {to_first:.1f} s")


if __name__ == "__main__":
    main()
