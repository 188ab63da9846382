"""`megaclass check`: one table with advice; exit 0 only if training would start."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaclass
from megaclass.cli import main
from megaclass.launch.check_facts import clock_finding, difference_findings, host_findings
from megaclass.launch.check_findings import Report, State, bad, good
from megaclass.launch.check_host import code_digest

_MEMORY = {"free_bytes": 130 << 30, "total_bytes": 140 << 30}
GPU = {"name": "NVIDIA H200", "microseconds": 25.0, "is_right": True, **_MEMORY}
TORCH = {
    "version": "2.13.0+cu126",
    "cuda": "12.6",
    "gloo": True,
    "nccl": "2.27.3",
    "is_usable": True,
    "gpus": [GPU, GPU],
}
ON_CPU = {**TORCH, "cuda": None, "nccl": None, "is_usable": False, "gpus": [], "version": "2.13.0+cpu"}
FACTS = {
    "hostname": "gpu-1",
    "python": "3.12.1",
    "versions": {"Python": "3.12", "megaclass": "0.1.0", "torch": "2.13.0"},
    "megaclass": "0.1.0",
    "code": "0123456789abcdef",
    "config": None,
    "torch": TORCH,
    "mpi": None,
    "driver": "560.35.03",
    "driver_cuda": "12.6",
    "num_gpus_present": 2,
    "visible_devices": None,
    "num_cpus": 16,
    "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "workdir": "/work",
    "free_disk_bytes": 500 << 30,
    "free_shared_bytes": 60 << 30,
}


def finding(what, slots=2, **change):
    [found] = [f for f in host_findings({**FACTS, **change}, slots) if f.what == what]
    return found


# ---- one host ----


def test_a_host_with_two_gpus_and_two_slots_has_nothing_to_mend():
    found = host_findings(FACTS, 2)
    assert {f.what for f in found if f.state is not State.GOOD} == {"MPI"}
    assert finding("GPU 1").found == "NVIDIA H200, a product in 25 µs, 130.0 of 140.0 GiB free"


def test_a_host_without_a_gpu_trains_on_its_cpus():
    found = host_findings({**FACTS, "torch": ON_CPU, "driver": None, "driver_cuda": None, "num_gpus_present": 0}, 2)
    assert Report(findings={"h": found}).would_start
    assert [f.what for f in found if f.state is State.ABSENT] == ["CUDA", "driver", "GPUs", "NCCL", "MPI"]


@pytest.mark.parametrize(
    ("what", "change", "found", "advice"),
    [
        ("Python", {"python": "3.10.2"}, "3.10.2", "needs Python 3.11"),
        ("torch", {"torch": None}, "not installed", "pip install torch"),
        ("torch", {"torch": {"fault": "ImportError: libcudart.so.12"}}, "libcudart", "--force-reinstall torch"),
        ("torch", {"torch": {**TORCH, "version": "2.4.1"}}, "2.4.1", 'pip install "torch>=2.11"'),
        ("driver", {"driver_cuda": "11.4", "driver": "470.1"}, "torch is built for 12.6", "torch build for CUDA 11"),
        ("driver", {"torch": ON_CPU, "driver": None, "driver_cuda": None}, "2 NVIDIA GPU(s) on the bus", "nvidia-smi"),
        ("GPUs", {"torch": ON_CPU}, "2 present, none usable", "is a CPU build"),
        ("GPUs", {"torch": {**TORCH, "gpus": [], "is_usable": False}}, "none usable", "compare nvidia-smi"),
        (
            "GPUs",
            {"torch": {**TORCH, "gpus": [], "is_usable": False}, "visible_devices": ""},
            "none usable",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ("GPU 0", {"torch": {**TORCH, "gpus": [{"name": "A", "fault": "ECC"}]}}, "A: ECC", "nvidia-smi --gpu-reset"),
        ("GPU 0", {"torch": {**TORCH, "gpus": [{**GPU, "is_right": False}]}}, "computes wrongly", "dmesg"),
        ("NCCL", {"torch": {**TORCH, "nccl": None}}, "not in this torch", "torch build for CUDA"),
        ("gloo", {"torch": {**TORCH, "gloo": False}}, "not in this torch", "--force-reinstall torch"),
        ("slots", {"torch": {**TORCH, "gpus": [GPU]}}, "2 for 1 GPU(s)", "at most 1 slots in -H"),
        ("free disk", {"free_disk_bytes": 1 << 20}, "0.0 GiB at /work", "du -xsh /work"),
        ("free disk", {"workdir": None}, "not there", "--workdir"),
        ("shared memory", {"free_shared_bytes": 60 << 20}, "0.06 GiB free in /dev/shm", "docker run --shm-size=8g"),
    ],
)
def test_what_keeps_training_from_starting_is_named_with_what_to_do(what, change, found, advice):
    one = finding(what, **change)
    assert one.state is State.BAD and found in one.found and advice in one.advice


@pytest.mark.parametrize(
    ("what", "change", "advice"),
    [
        ("GPUs", {"num_gpus_present": 4, "visible_devices": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1 hides the others"),
        ("slots", {"slots": 1}, "1 of them will sit idle: give 2 slots"),
        ("free disk", {"free_disk_bytes": 5 << 30}, "Enough to start"),
        ("shared memory", {"free_shared_bytes": 500 << 20}, "--shm-size"),
        ("shared memory", {"free_shared_bytes": None}, "mount -t tmpfs"),
    ],
)
def test_what_somebody_will_wonder_about_later_does_not_stop_the_start(what, change, advice):
    one = finding(what, **change)
    assert one.state is State.DOUBTFUL and advice in one.advice


# ---- hosts compared ----


def test_hosts_that_differ_are_set_against_each_other():
    versions = {**FACTS["versions"], "torch": "2.12.0"}
    other = {**FACTS, "code": "ffffffffffffffff", "config": "b" * 64, "versions": versions}
    hosts = {"h1": {**FACTS, "config": "a" * 64}, "h2": other}
    found = {f.what: f.found for f in difference_findings(hosts, "tiny.toml") if f.state is State.BAD}
    assert found == {
        "same versions": "torch is 2.13.0 on h1; 2.12.0 on h2",
        "same code": "megaclass is 0123456789ab on h1; ffffffffffff on h2",
        "same config": "tiny.toml is aaaaaaaaaaaa on h1; bbbbbbbbbbbb on h2",
    }


def test_a_config_that_is_missing_on_a_host_comes_with_the_line_that_copies_it():
    [*_, one] = difference_findings({"h1": {**FACTS, "config": "a" * 64}, "h2": FACTS}, "tiny.toml")
    assert (one.state, one.advice) == (State.BAD, "Copy it: scp tiny.toml h2:tiny.toml")


def test_a_clock_is_doubted_only_beyond_what_the_question_itself_took():
    assert clock_finding(0.4, 0.01).state is State.GOOD
    assert clock_finding(-5.0, 4.5).state is State.GOOD
    assert clock_finding(-5.0, 0.01).state is State.DOUBTFUL
    assert clock_finding(-5.0, 0.01).found.startswith("-5.000 s against this machine")


def test_the_code_is_another_after_any_change(tmp_path):
    (tmp_path / "a.py").write_text("one")
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = code_digest(tmp_path)
    (tmp_path / "b.py").write_text("two")
    assert len({before, renamed, code_digest(tmp_path)}) == 3


def test_the_table_has_an_advice_line_under_each_problem():
    report = Report(findings={"h1 (2 slots)": [good("ssh", "fine")], "h2": [bad("shared memory", "none", "Do it.")]})
    assert (
        report.table()
        == """
h1 (2 slots)
    [X] ssh            fine

h2
    [!] shared memory  none
        Do it.

Training would not start: 1 problem, marked [!]."""
    )


# ---- for real ----


def run(command, timeout_s=120):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def mounted(bed, host, source, target):
    run(bed.inside(host, "mount", "--bind", str(source), str(target))).check_returncode()
    try:
        yield
    finally:
        run(bed.inside(host, "umount", str(target))).check_returncode()


@pytest.fixture
def check(bed):
    """check(arguments…) on h1 of the bed."""

    def on_h1(*arguments, config="ssh_config"):
        ssh = ("--ssh-arg=-F", f"--ssh-arg={bed.folder / config}")
        return run(bed.inside("h1", sys.executable, "-m", "megaclass", "check", *ssh, *arguments))

    return on_h1


def test_this_machine_would_train(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text("")
    code = main(["check", "recipe.toml"])
    table = capfd.readouterr().out
    assert code == 0, table
    assert table.startswith("localhost (this machine, ")
    assert "[X] gloo" in table and "[X] all-reduce" in table and "µs, bus bandwidth" in table
    assert "[X] same config    recipe.toml e3b0c44298fc" in table
    assert "\nTraining would start." in table


def test_two_hosts_that_work_are_shown_in_json_and_end_with_0(check):
    done = check("-H", "h1:1,h2:1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["would_start"] is True
    states = {(one["where"], one["what"]): one["state"] for one in answer["findings"]}
    for what in (
        "name",
        "ssh",
        "clock",
        "Python",
        "torch",
        "gloo",
        "slots",
        "free disk",
        "shared memory",
        "route",
        "ports",
    ):
        assert states["h2 (1 slot)", what] in ("good", "doubtful"), what
    for what in ("same versions", "same code", "all-reduce"):
        assert states["together", what] == "good"


def test_hosts_that_work_and_hosts_that_do_not_stand_in_one_table(bed, check, tmp_path):
    common = (bed.folder / "ssh_config").read_text()
    strange = common.replace(f"{bed.folder}/id", f"{bed.folder}/stranger").replace("Host h*", "Host h3")
    (bed.folder / "strange_config").write_text(strange + common.replace("Host h*", "Host h* !h3"))
    with mounted(bed, "h2", tmp_path, Path(sys.executable).parent):
        done = check("-H", "h1:1,h2:1,h3:1,h77:1,10.123.0.99:1", config="strange_config")
    assert done.returncode == 1, done.stderr
    parts = {part.partition("\n")[0]: part for part in done.stdout.split("\n\n")}
    assert "[!]" not in parts["h1 (this machine, 1 slot)"] and "[X] torch" in parts["h1 (this machine, 1 slot)"]
    assert "[!] Python" in parts["h2 (1 slot)"] and f"no Python at {sys.executable}" in parts["h2 (1 slot)"]
    assert "with --python" in parts["h2 (1 slot)"]
    assert f"Type: ssh-copy-id -F {bed.folder}/strange_config h3\n" in parts["h3 (1 slot)"] + "\n"
    assert "[!] name" in parts["h77 (1 slot)"] and "/etc/hosts" in parts["h77 (1 slot)"]
    assert "[!] ssh            there is no route to it" in parts["10.123.0.99 (1 slot)"]
    assert "[?] all-reduce" in parts["together"] and "Training would not start: 5 problems" in done.stdout


def test_a_firewall_other_code_and_a_missing_interface_are_found(bed, check, tmp_path):
    if shutil.which("nft") is None:
        pytest.skip("there is no nft: apt-get install nftables")
    source = Path(megaclass.__file__).parent / "errors.py"
    (tmp_path / "errors.py").write_text(source.read_text() + "\n# changed\n")
    chain = "add table inet wall; add chain inet wall i { type filter hook input priority 0; }"
    rules = f"{chain}; add rule inet wall i tcp dport != 22 ct state new drop"
    run(bed.inside("h2", "nft", rules)).check_returncode()
    try:
        with mounted(bed, "h2", tmp_path / "errors.py", source):
            done = check("-H", "h1:1,h2:1", "--network-interface", "eth9")
    finally:
        run(bed.inside("h2", "nft", "delete", "table", "inet", "wall")).check_returncode()
    assert done.returncode == 1, done.stderr
    one, two, together, _ = done.stdout.split("\n\n")
    assert "[!] ports" in one and "cannot connect to h2 (10.123.0.2) port " in one and ": no answer" in one
    assert "Type on h2: sudo ufw allow from 10.123.0.1" in one
    assert "[X] ports" in two and "[X] route" in two
    assert "[!] interface      there is no eth9 with an address" in one and "one of: eth0, lo" in one
    assert "[!] same code" in together


def test_a_host_list_that_cannot_be_read_is_refused(capsys):
    assert main(["check", "-H", "h1:1,-oProxyCommand=x:1"]) == 2
    assert "Cannot read host '-oProxyCommand=x:1'" in capsys.readouterr().err
