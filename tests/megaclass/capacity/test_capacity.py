"""`megaclass plan`: its numbers against measured ones and against the formulas of the documentation."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megaclass.capacity.job import GIB, GPUS, PlannedJob, gpu_named
from megaclass.capacity.memory import plan_memory
from megaclass.capacity.plan import _checkpoint_bytes, make_plan, plan_text
from megaclass.capacity.speed import exchanges, step_time
from megaclass.cli.main import main
from megaclass.config.read import load_config_values
from megaclass.data.loading import choose
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.bench import read_and_decode_rate
from megaclass.data.tools.synthesize import synthesize


def job(name: str, batch: int, num_classes: int, rate: float, num_ranks: int = 1, **train: object) -> PlannedJob:
    tables = {
        "data": {"path": "unused"},
        "backbone": {"name": name, "embedding_dim": 512},
        "head": {"sample_rate": rate, "optimizer": "sgd"},
        "train": {"run_dir": "unused", "global_batch": batch, **train},
    }
    config = load_config_values(tables, where="test")
    return PlannedJob(config, GPUS["h200"], num_ranks, 8, num_classes, 10 * num_classes, (112, 112), 11e9)


# Rows of benchmarks/step-h200.md. The host limits the compiled vit_b: the mean of a slow one and a fast one.
@pytest.mark.parametrize(
    ("planned", "gib", "images_per_second"),
    [
        (job("iresnet50", 512, 1_048_576, 1.0), 20.2, 8234),
        (job("iresnet100", 512, 1_048_576, 1.0), 29.0, 4970),
        (job("iresnet50", 512, 2_097_152, 0.1), 22.7, 8864),
        (job("vit_b", 256, 1_048_576, 0.3, compile=True), 19.8, 3880),
    ],
    ids=["r50", "r100", "r50 sampled", "vit_b compiled"],
)
def test_memory_is_within_10_and_speed_within_15_percent_of_what_was_measured_on_an_h200(
    planned: PlannedJob, gib: float, images_per_second: float
) -> None:
    assert plan_memory(planned).peak / GIB == pytest.approx(gib, rel=0.10)
    speed = planned.config.train.global_batch / step_time(planned).compute
    assert speed == pytest.approx(images_per_second, rel=0.15)


def test_a_backbone_that_is_replayed_as_cuda_graphs_keeps_its_activations_and_a_copy_of_the_images() -> None:
    """By default where forward keeps at most 32 GiB of an H200, on one rank."""

    def extra(planned: PlannedJob) -> int:
        return plan_memory(planned).peak - plan_memory(planned.with_settings(train={"cuda_graph": "off"})).peak

    small, large = (job("iresnet50", batch, 2 << 20, 1.0) for batch in (128, 2048))
    assert 128 * 112 * 112 * 3 * 4 <= extra(small) < GIB
    assert extra(large) == 0 < extra(large.with_settings(train={"cuda_graph": "on"}))
    assert extra(job("iresnet50", 128, 2 << 20, 1.0, num_ranks=2)) == 0
    assert extra(small.with_settings(train={"accumulate": 2})) == 0
    assert extra(small.with_settings(backbone={"dropout": 0.1})) == 0


def test_exchanges_are_those_of_the_documentation() -> None:
    # docs/how-it-works.md: 64 ranks, max_batch 128, D = 512, bf16.
    sent = exchanges(job("slim", 8192, 100_000_000, 0.1, num_ranks=64))
    assert [one.buffer for one in sent[:3]] == [8_455_168, 131_080, 16_777_216]
    assert sent[3].buffer == 4 * job("slim", 64, 64, 1.0).backbone().num_trained
    assert exchanges(job("slim", 64, 64, 1.0)) == []


def test_the_largest_batch_and_number_of_classes_fit_and_slightly_more_does_not() -> None:
    planned = job("slim", 64, 1_000_000, 1.0, num_ranks=2)
    plan = make_plan(planned)
    for share, fits in ((1.0, True), (1.02, False)):
        classes = replace(planned, num_classes=int(share * plan["largest_num_classes"]))
        batch = planned.with_settings(train={"global_batch": int(share * plan["largest_global_batch"])})
        assert plan_memory(classes).fits(planned.gpu.memory) is fits
        assert plan_memory(batch).fits(planned.gpu.memory) is fits


def test_the_plan_says_how_many_gpus_a_job_needs_and_with_which_settings_fewer_suffice() -> None:
    # Five million classes: centres and their momentum alone take 19.1 of the 23.5 GiB of a 4090.
    planned = replace(job("iresnet100", 1024, 5_000_000, 1.0), gpu=GPUS["rtx4090"])
    plan = make_plan(planned)
    assert not plan["fits"] and plan["largest_num_classes"] == plan["largest_global_batch"] == 0
    found = [one["setting"].split() for one in plan["smallest_that_fit"]]
    assert found[0] == ["-np", "4"], "the first changes nothing but the number of GPUs"
    numbers = [int(one[1]) for one in found]
    assert numbers == sorted(set(numbers), reverse=True) and numbers[-1] == 1
    for one in found:
        sections: dict[str, dict[str, object]] = {"head": {}, "train": {}}
        for setting in one[2:]:
            name, _, value = setting.partition("=")
            section, key = name.split(".")
            sections[section][key] = value if value == "bf16" else float(value) if "." in value else int(value)
        changed = replace(planned.with_settings(**sections), num_ranks=int(one[1]))
        assert plan_memory(changed).fits(planned.gpu.memory), one
        if changed.num_ranks > 1 and len(one) == 2:
            assert not plan_memory(replace(changed, num_ranks=changed.num_ranks // 2)).fits(planned.gpu.memory)
    text = plan_text(plan, planned)
    assert "Does not fit: 67.28 GiB are needed per GPU, which has 23.50 GiB. It fits with -np 4." in text
    assert "no batch with these classes, or no number of classes with this batch" in text


def test_a_job_that_no_number_of_gpus_can_hold_says_so() -> None:
    # Every rank keeps all images: more ranks do not help.
    planned = job("slim", 64, 50_000_000, 1.0).with_settings(data={"on_gpu": True})
    plan = make_plan(planned)
    assert plan["smallest_that_fit"] == []
    assert "Nothing fits on up to 1,024 of these GPUs" in plan_text(plan, planned)


def test_a_replayed_backward_does_not_hide_the_exchange_of_its_gradients() -> None:
    # 64 images per rank, on the network of a good cluster.
    small = replace(job("iresnet50", 512, 100_000, 1.0, num_ranks=8), network=400e9)
    replayed = small.with_settings(train={"cuda_graph": "on"})
    assert make_plan(replayed)["step_s"]["exchange"] > make_plan(small)["step_s"]["exchange"]
    assert make_plan(replayed)["images_per_second"] > 1.5 * make_plan(small)["images_per_second"]


def test_a_split_backbone_takes_its_share_of_memory_and_more_bytes_between_ranks() -> None:
    whole, split = (job("vit_b", 256, 4096, 1.0, num_ranks=8, compile=False, shard_backbone=s) for s in (False, True))
    parts = [plan_memory(one).parts for one in (whole, split)]
    for name in ("gradients", "backbone"):
        assert parts[1][name] == pytest.approx(parts[0][name] / 8, rel=0.01)
    # The largest part is what no block contains, with the linear layer over all 144 patches.
    assert parts[1]["gathered blocks"] == pytest.approx(3 * 4 * 512 * 512 * 144, rel=0.02)
    assert "gathered blocks" not in parts[0] and sum(parts[1].values()) < sum(parts[0].values())
    saved = [_checkpoint_bytes(one, plan_memory(one)) for one in (whole, split)]
    assert saved[1] == pytest.approx(saved[0], rel=0.01)
    sent = [exchanges(one)[-1].buffer for one in (whole, split)]
    assert sent == [4 * whole.backbone().num_trained, 4 * whole.backbone().num_parameters]
    assert exchanges(split)[-1].seconds > exchanges(whole)[-1].seconds


def test_recomputed_activations_need_less_memory_and_more_time() -> None:
    stored = job("iresnet18", 256, 1000, 1.0)
    again = stored.with_settings(backbone={"checkpoint_activations": True})
    assert plan_memory(again).parts["activations"] < 0.75 * plan_memory(stored).parts["activations"]
    assert step_time(again).backbone > 1.15 * step_time(stored).backbone


def test_the_command_prints_text_and_json_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    recipe = [f"data.path={tmp_path}/none", "backbone.name=slim", "synth.identities=0", "train.global_batch=512"]
    assert main(["plan", "demo", *recipe]) == 2
    assert "give --classes and --images" in capsys.readouterr().err
    size = ["--classes", "2,000,000", "--images", "40_000_000", "--gpu"]
    assert main(["plan", "demo", *recipe, *size, "abacus"]) == 2
    assert "known: b200, h200" in capsys.readouterr().err
    assert main(["plan", "demo", *recipe, *size, "a100"]) == 2
    assert "--gpu is 'a100', which may be a100-80 or a100-40" in capsys.readouterr().err
    assert main(["plan", "demo", *recipe, *size, "4090", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["gpu"] == "rtx4090"
    assert main(["plan", "demo", "-np", "16", *recipe, *size, "a100-80", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak_bytes"] == sum(plan["bytes"].values())
    assert plan["num_ranks"] == 16 and plan["num_hosts"] == 2 and len(plan["exchanges"]) == 4
    assert main(["plan", "demo", *recipe, *size, "l4", "head.optimizer=adamw"]) in (0, 1)
    text = capsys.readouterr().out
    assert "The recipe trains on a CPU (train.device=cpu), which is not planned" in text
    assert "Memory per rank" in text and "centres" in text and "images/s" in text


def with_data(planned: PlannedJob, **data: object) -> PlannedJob:
    return planned.with_settings(data=data)


def readers(planned: PlannedJob) -> tuple[int, int]:
    plan = make_plan(planned)
    return plan["loader_processes_per_rank"], plan["reader_threads_per_rank"]


def test_the_loader_is_the_one_that_training_would_start_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = job("slim", 8 * 64, 1000, 1.0, num_ranks=8)
    for cores in (16, 64, 1024):
        monkeypatch.setattr(choose, "available_cores", lambda cores=cores: cores)
        cuda = torch.device("cuda")
        started = choose.choose_processes("debug", workers="auto", device=cuda, num_local_ranks=8)
        assert readers(with_data(planned)) == (started.num_processes, started.num_processes)
    assert readers(with_data(planned, workers=3, threads=2)) == (3, 3)
    assert readers(with_data(planned, workers=0, threads=5)) == (0, 5)
    on_gpu = plan_memory(with_data(planned, on_gpu=True))
    assert on_gpu.parts["training images"] == 10_000 * 112 * 112 * 3


@pytest.mark.ranks
def test_the_decode_rate_is_measured_on_the_data_of_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    synthesize(tmp_path / "data", num_identities=8, images_per_identity=8, image_size=32, seed=0, num_pairs=20)
    source = open_source(str(tmp_path / "data"))
    read = type(source).read
    seen = set()

    def slow_read(self: object, index: int) -> bytes:
        time.sleep(0.01)
        seen.add(index)
        return read(self, index)

    recipe = ["plan", "demo", f"data.path={tmp_path}/data", "synth.identities=0", "train.nproc=1", "--gpu", "h200"]
    main([*recipe, "--json"])
    quick = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(type(source), "read", slow_read)
    assert 10 < read_and_decode_rate(source, seconds=0.1, batch=16) < 100, "ten milliseconds per image are waited for"
    assert len(seen) >= 16
    main([*recipe, "data.workers=4"])
    assert "each rank has 4 loader processes: set data.workers=" in capsys.readouterr().out
    assert quick["decode_images_per_second_per_thread"] > 100
    assert quick["threads_needed_per_rank"] == -(
        -quick["images_per_second"] // quick["decode_images_per_second_per_thread"]
    )


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, "a100-40"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, "rtx4090"),
        ("Abacus", 1.0, "h200"),
    ],
)
def test_the_gpu_of_this_machine_is_recognised_by_its_name_and_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: float, known: str
) -> None:
    here = SimpleNamespace(name=name, total_memory=round(gib * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    memory = GPUS["h200"].memory if known == "h200" else here.total_memory
    assert gpu_named(None) == replace(GPUS[known], memory=memory)
