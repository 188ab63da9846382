"""`megaclass check`: one table with advice; exit 0 only if training would start."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import megaclass_launch
from megaclass.cli.main import main
from megaclass_launch.check.probe import code_digest
from megaclass_launch.check.probe_client import ProbeClient, checked, rows_in
from megaclass_launch.check.rules import (
    FindingState,
    Report,
    bad,
    default_slots,
    difference_findings,
    good,
    host_findings,
)
from megaclass_launch.driver.ssh import address_in
from megaclass_launch.hosts import Host
from megaclass_launch.wire.checks import plain_lines
from megaclass_launch.wire.protocol import ProtocolError

_MEMORY = {"free_bytes": 130 << 30, "total_bytes": 140 << 30}
GPU = {"name": "NVIDIA H200", "fault": "", "microseconds": 25.0, "is_right": True, **_MEMORY}
TORCH = {
    "fault": "",
    "version": "2.13.0+cu126",
    "cuda": "12.6",
    "gloo": True,
    "nccl": "2.27.3",
    "is_usable": True,
    "why_unusable": "",
    "gpus": [GPU, GPU],
}
UNUSABLE = {**TORCH, "gpus": [], "is_usable": False, "why_unusable": "driver too old"}
ON_CPU = {**TORCH, "cuda": None, "nccl": None, "is_usable": False, "gpus": [], "version": "2.13.0+cpu"}
NO_TORCH = {**ON_CPU, "version": "not installed", "fault": "not installed"}
FACTS = {
    "hostname": "gpu-1",
    "python": "3.12.1",
    "versions": {"Python": "3.12", "megaclass-launch": "0.1.0", "torch": "2.13.0"},
    "code": {"megaclass-launch": "0123456789abcdef"},
    "config": None,
    "torch": TORCH,
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
    assert not [f for f in found if f.state is not FindingState.GOOD]
    assert finding("GPU 1").found == "NVIDIA H200, matrix product in 25 µs, 130.0 of 140.0 GiB free"


def test_a_driver_that_runs_a_newer_cuda_all_the_same_is_not_doubted():
    assert finding("driver", driver_cuda="11.4").state is FindingState.GOOD


def test_where_nobody_says_how_many_slots_each_usable_gpu_gets_one():
    assert default_slots({**FACTS, "num_gpus_present": 8}) == 2
    assert default_slots({**FACTS, "torch": {**TORCH, "gpus": [GPU]}}) == 1
    assert default_slots({**FACTS, "torch": ON_CPU}) == default_slots({**FACTS, "torch": NO_TORCH}) == 2


def test_a_host_without_a_gpu_trains_on_its_cpus():
    found = host_findings({**FACTS, "torch": ON_CPU, "driver": None, "driver_cuda": None, "num_gpus_present": 0}, 2)
    assert Report(findings={"h": found}).would_start
    assert [f.what for f in found if f.state is FindingState.ABSENT] == ["CUDA", "driver", "GPUs", "NCCL"]


@pytest.mark.parametrize(
    ("what", "change", "found", "advice"),
    [
        ("Python", {"python": "3.10.2"}, "3.10.2", "needs Python 3.11"),
        ("torch", {"torch": NO_TORCH}, "not installed", "pip install torch"),
        ("torch", {"torch": {**UNUSABLE, "fault": "no libcudart"}}, "libcudart", "--force-reinstall torch"),
        ("torch", {"torch": {**TORCH, "version": "2.4.1"}}, "2.4.1", 'pip install "torch>=2.11"'),
        (
            "driver",
            {"driver_cuda": "11.4", "driver": "470.1", "torch": UNUSABLE},
            "torch is built for 12.6",
            "torch build for CUDA 11",
        ),
        ("driver", {"torch": ON_CPU, "driver": None, "driver_cuda": None}, "2 NVIDIA GPU(s) on the bus", "nvidia-smi"),
        ("GPUs", {"torch": ON_CPU}, "2 present, none usable", "is a CPU build"),
        ("GPUs", {"torch": ON_CPU, "visible_devices": "0"}, "2 present, none usable", "is a CPU build"),
        ("GPUs", {"torch": UNUSABLE}, "none usable: driver too old", "compare nvidia-smi"),
        ("GPUs", {"torch": UNUSABLE, "visible_devices": ""}, "none usable", "unset CUDA_VISIBLE_DEVICES"),
        ("GPUs", {"torch": {**NO_TORCH, "fault": "ImportError"}}, "none usable", "Fix torch first"),
        (
            "GPU 0",
            {"torch": {**TORCH, "gpus": [{**GPU, "name": "A", "fault": "ECC"}]}},
            "A: ECC",
            "nvidia-smi --gpu-reset",
        ),
        (
            "GPU 0",
            {"torch": {**TORCH, "gpus": [{**GPU, "name": "A", "fault": "CUDA out of memory"}]}},
            "A",
            "shows which",
        ),
        (
            "GPU 0",
            {"torch": {**TORCH, "gpus": [{**GPU, "name": "A", "fault": "no kernel image"}]}},
            "A",
            "get_arch_list",
        ),
        ("GPU 0", {"torch": {**TORCH, "gpus": [{**GPU, "is_right": False}]}}, "computes wrongly", "dmesg"),
        ("NCCL", {"torch": {**TORCH, "nccl": None}}, "not in this torch", "torch build for CUDA"),
        ("gloo", {"torch": {**TORCH, "gloo": False}}, "not in this torch", "--force-reinstall torch"),
        ("slots", {"torch": {**TORCH, "gpus": [GPU]}}, "2 for 1 GPU(s)", "at most 1 slots in -H"),
        ("free disk", {"free_disk_bytes": 1 << 20}, "0.0 GiB at /work", "du -xsh /work"),
        ("free disk", {"workdir": None}, "does not exist", "--workdir"),
        ("shared memory", {"free_shared_bytes": 60 << 20}, "0.06 GiB free in /dev/shm", "docker run --shm-size=8g"),
    ],
)
def test_what_keeps_training_from_starting_is_named_with_what_to_do(what, change, found, advice):
    one = finding(what, **change)
    assert one.state is FindingState.BAD and found in one.found and advice in one.advice


@pytest.mark.parametrize(
    ("what", "change", "advice"),
    [
        ("GPUs", {"num_gpus_present": 4, "visible_devices": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1 hides the others"),
        ("slots", {"slots": 1}, "1 of them will stay idle: use 2 slots"),
        ("free disk", {"free_disk_bytes": 5 << 30}, "Enough to start"),
        ("shared memory", {"free_shared_bytes": 500 << 20}, "--shm-size"),
        ("shared memory", {"free_shared_bytes": None}, "mount -t tmpfs"),
    ],
)
def test_what_somebody_will_wonder_about_later_does_not_stop_the_start(what, change, advice):
    one = finding(what, **change)
    assert one.state is FindingState.DOUBTFUL and advice in one.advice


# ---- hosts compared ----


def test_hosts_that_differ_are_set_against_each_other():
    versions = {**FACTS["versions"], "torch": "2.12.0"}
    other = {**FACTS, "code": {"megaclass-launch": "ffffffffffffffff"}, "config": "b" * 64, "versions": versions}
    hosts = {"h1": {**FACTS, "config": "a" * 64}, "h2": other}
    findings = [
        f for f in difference_findings(hosts, "tiny.toml", "/job", "/env/python") if f.state is FindingState.BAD
    ]
    assert {f.what: f.found for f in findings} == {
        "same versions": "torch is 2.13.0 on h1; 2.12.0 on h2",
        "same code": "megaclass-launch is 0123456789ab on h1; ffffffffffff on h2",
        "same config": "tiny.toml is aaaaaaaaaaaa on h1; bbbbbbbbbbbb on h2",
    }
    assert [f.advice for f in findings if f.what != "same code"] == [
        "Type on h2: /env/python -m pip install torch==2.13.0",
        "Type on h1: scp /job/tiny.toml h2:/job/tiny.toml",
    ]


def test_the_versions_to_install_are_those_of_a_host_that_has_them():
    versions = {**FACTS["versions"], "Python": "3.11", "torch": "not installed"}
    hosts = {"h1": {**FACTS, "versions": versions}, "h2": FACTS, "h3": FACTS}
    python, torch = (
        f.advice for f in difference_findings(hosts, None, "/job", "python") if f.state is FindingState.BAD
    )
    assert python == "Install Python 3.11 with torch and megaclass on h2, h3, and set --python to it."
    assert torch == "Type on h1: python -m pip install torch==2.13.0"


def test_a_config_that_is_missing_on_a_host_comes_with_the_line_that_copies_it():
    hosts = {"h1": FACTS, "h2": {**FACTS, "config": "a" * 64}, "h3": FACTS}
    [*_, one] = difference_findings(hosts, "tiny.toml", "/job", "python")
    assert (one.state, one.found) == (FindingState.BAD, "tiny.toml is not on h1, h3")
    assert one.advice == "Type on h2: scp /job/tiny.toml h1:/job/tiny.toml && scp /job/tiny.toml h3:/job/tiny.toml"


def test_a_config_that_is_nowhere_is_a_question_of_the_path():
    [*_, one] = difference_findings({"h1": FACTS, "h2": FACTS}, "tiny.toml", "/job", "python")
    assert (one.found, one.advice) == ("tiny.toml is not on h1, h2", "Check the path: looked for /job/tiny.toml")


def test_the_code_is_another_after_any_change(tmp_path):
    (tmp_path / "a.py").write_text("one")
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = code_digest(tmp_path)
    (tmp_path / "b.py").write_text("two")
    assert len({before, renamed, code_digest(tmp_path)}) == 3


def test_the_table_has_an_advice_line_under_each_problem():
    findings = {"h1": [good("ssh", "fine")], "h2": [bad("shared memory", "none", "Do it.")]}
    report = Report(findings=findings, titles={"h1": "h1 (2 slots)"})
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


def run(command, timeout_s=120, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, **more)


def wait_until(condition, what):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


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

    def on_h1(*arguments, config="ssh_config", env=None):
        ssh = ("--ssh-arg=-F", f"--ssh-arg={bed.folder / config}")
        command = bed.inside("h1", sys.executable, "-m", "megaclass", "check", *ssh, *arguments)
        whole = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        return run(command, env=whole)

    return on_h1


@pytest.mark.ranks
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
        "ssh",
        "Python",
        "torch",
        "gloo",
        "slots",
        "free disk",
        "shared memory",
        "route",
        "ports",
    ):
        assert states["h2", what] in ("good", "doubtful"), what
    for what in ("same versions", "same code", "all-reduce"):
        assert states["together", what] == "good"
    assert answer["facts"]["h2"]["hostname"] == "h2" and answer["facts"]["h2"]["torch"]["gloo"] is True
    assert [row["num_wrong"] for row in answer["all_reduce"]] == [0, 0]


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
    assert "[X] ssh" in parts["h2 (1 slot)"], "it is Python that is missing"
    line = f"Give the key with -i, or copy it with `ssh-copy-id -F {bed.folder}/strange_config h3`.\n"
    assert line in parts["h3 (1 slot)"] + "\n"
    assert "its name cannot be resolved" in parts["h77 (1 slot)"] and "/etc/hosts" in parts["h77 (1 slot)"]
    assert "[!] ssh            there is no route to it" in parts["10.123.0.99 (1 slot)"]
    assert "`ping -c 3 10.123.0.99`" in parts["10.123.0.99 (1 slot)"]
    assert "[?] all-reduce" in parts["together"] and "Training would not start: 4 problems" in done.stdout


def test_a_host_key_that_nobody_has_confirmed_comes_with_the_login_to_type(bed, check):
    text = (bed.folder / "ssh_config").read_text().replace("/known_hosts", "/nothing_known")
    (bed.folder / "unknown_config").write_text(text)
    done = check("-H", "h2:1", config="unknown_config")
    assert done.returncode == 1 and "its host key is not known\n" in done.stdout
    assert f"Log in once with `ssh -F {bed.folder}/unknown_config h2` and compare the key." in done.stdout


def test_little_disk_and_little_shared_memory_are_found(bed, check, tmp_path):
    for folder, size in ((tmp_path, "80m"), ("/dev/shm", "500m")):
        run(bed.inside("h2", "mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(folder))).check_returncode()
    try:
        done = check("-H", "h1:1,h2:1", "--workdir", str(tmp_path))
    finally:
        for folder in (tmp_path, "/dev/shm"):
            run(bed.inside("h2", "umount", str(folder))).check_returncode()
    one, two, *_ = done.stdout.split("\n\n")
    assert done.returncode == 1 and "[!]" not in one
    assert f"[!] free disk      0.1 GiB at {tmp_path}\n" in two and f"du -xsh {tmp_path}/* | sort -h" in two
    assert "[?] shared memory  0.49 GiB free in /dev/shm" in two and "remount,size=8G /dev/shm" in two
    assert "Training would not start: 1 problem, marked [!]." in done.stdout, "only the disk stops the start"


@pytest.mark.ranks
def test_a_python_that_says_nothing_here_is_not_blamed_on_ssh(capsys, tmp_path):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    assert main(["check", "--python", str(slow), "--start-timeout", "0.5"]) == 1
    table = capsys.readouterr().out
    assert table.startswith("localhost (this machine)\n") and "[!] Python      it did not report in time\n" in table
    assert f"Type: {slow} -m megaclass_launch --version" in table


@pytest.mark.ranks
def test_a_python_that_is_not_there_is_named(capsys):
    assert main(["check", "--python", "/nowhere/python"]) == 2
    assert (
        "Cannot start '/nowhere/python' for localhost: No such file or directory. Set --python"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", [["--start-timeout", "-1"], ["-p", "0"], ["--master-port", "x"]])
def test_numbers_that_make_no_sense_are_refused(capsys, option):
    with pytest.raises(SystemExit) as left:
        main(["check", *option])
    assert left.value.code == 2 and option[1] in capsys.readouterr().err


def test_without_ssh_here_no_host_is_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["check", "-H", "h77:1"]) == 2
    assert (
        "ssh is not installed here, but is needed to reach h77: sudo apt install openssh-client"
        in capsys.readouterr().err
    )


def test_a_firewall_a_missing_interface_and_hosts_with_other_code_torch_and_recipe_are_found(bed, check, tmp_path):
    if shutil.which("nft") is None:
        pytest.skip("there is no nft: apt-get install nftables")
    source = Path(megaclass_launch.__file__).parent / "errors.py"
    (tmp_path / "errors.py").write_text(source.read_text() + "\n# changed\n")
    version = Path(torch.__file__).with_name("version.py")
    (tmp_path / "version.py").write_text(version.read_text().replace(torch.__version__, "2.11.7"))
    (tmp_path / "recipe.toml").write_text("one")
    (tmp_path / "other.toml").write_text("two")
    chain = "add table inet wall; add chain inet wall i { type filter hook input priority 0; }"
    rules = f"{chain}; add rule inet wall i tcp dport != 22 ct state new drop"
    run(bed.inside("h2", "nft", rules)).check_returncode()
    try:
        with (
            mounted(bed, "h2", tmp_path / "errors.py", source),
            mounted(bed, "h2", tmp_path / "version.py", version),
            mounted(bed, "h2", tmp_path / "other.toml", tmp_path / "recipe.toml"),
        ):
            done = check("-H", "h1:1,h2:1", "--network-interface", "eth9", str(tmp_path / "recipe.toml"))
    finally:
        run(bed.inside("h2", "nft", "delete", "table", "inet", "wall")).check_returncode()
    assert done.returncode == 1, done.stderr
    one, two, together, _ = done.stdout.split("\n\n")
    assert "[!] ports" in one and "cannot connect to h2 (10.123.0.2) port " in one and ": no answer" in one
    assert "Type on h2: sudo ufw allow from 10.123.0.1" in one
    assert "[X] ports" in two and "[X] route" in two
    assert "[!] interface      no interface eth9 with an address" in one and "one of: eth0, lo" in one
    assert "[!] same code" in together
    assert f"[!] same versions  torch is {torch.__version__} on h1; 2.11.7 on h2\n" in together
    assert f"Type on h2: {sys.executable} -m pip install torch=={torch.__version__.partition('+')[0]}\n" in together
    assert f"Type on h1: scp {tmp_path}/recipe.toml h2:{tmp_path}/recipe.toml\n" in together


def test_a_host_list_that_cannot_be_read_is_refused(capsys):
    assert main(["check", "-H", "h1:1,-oProxyCommand=x:1"]) == 2
    assert "Cannot read host '-oProxyCommand=x:1'" in capsys.readouterr().err


# ---- a host that was taken over ----

ODD = [
    None,
    True,
    -1,
    2**70,
    float("nan"),
    [],
    {},
    [None],
    "",
    "x; rm -rf ~",
    "\x1b[2J",
    "$(id)",
    "9" * 5000,
    {"a": []},
]


FACTS_ASKED = {"ask": "facts", "workdir": "/work", "config": None}


def test_facts_of_a_host_pass_unchanged():
    assert checked(FACTS_ASKED, FACTS) == FACTS
    assert checked(FACTS_ASKED, {**FACTS, "torch": NO_TORCH, "workdir": None})["workdir"] is None


def places(value):
    """Ways to replace each part of a nested value by another."""
    yield lambda other: other
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        for place in places(part):
            yield (
                lambda other, key=key, place=place: (
                    {**value, key: place(other)}
                    if isinstance(value, dict)
                    else [*value[:key], place(other), *value[key + 1 :]]
                )
            )


def test_facts_of_a_hostile_host_are_refused_or_give_findings_that_no_terminal_obeys():
    num_accepted = 0
    for place in places(FACTS):
        for odd in ODD:
            try:
                facts = checked(FACTS_ASKED, place(odd))
            except ProtocolError:
                continue
            num_accepted += 1
            findings = [
                *host_findings(facts, 2),
                *difference_findings({"a": FACTS, "b": facts}, None, "/work", "python"),
            ]
            text = Report(findings={"b": findings}).table()
            assert plain_lines(text) == text
            advice = " ".join(finding.advice for finding in findings if "Type" in finding.advice)
            assert "rm -rf" not in advice and "$(id)" not in advice
    assert num_accepted


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_other_answers_of_a_hostile_host_are_refused_or_harmless(odd):
    reach = {"ask": "reach", "peers": [("h2 10.0.0.2 1", "10.0.0.2", 1)]}
    for question, reply in (
        ({"ask": "listen", "port": 0}, {"port": odd, "fault": None}),
        (reach, {"towards": odd, "faults": {"h2 10.0.0.2 1": None}}),
        (reach, {"towards": "eth0", "faults": odd}),
    ):
        try:
            assert plain_lines(str(checked(question, reply))) == str(checked(question, reply))
        except ProtocolError as error:
            assert "is invalid" in str(error)
    assert rows_in(odd) == [] and rows_in([{"backend": odd}]) == []
    assert address_in(f"{odd} 1 {odd} 22", 0) is None


@pytest.mark.ranks
def test_a_host_whose_answers_make_no_sense_is_named_and_training_would_not_start(tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable} -S\nimport json, sys\n"
        "def say(text): sys.stdout.write(text + chr(10)); sys.stdout.flush()\n"
        "say('megaclass-agent ' + json.loads(sys.stdin.readline())['token'])\n"
        "say(json.dumps({'ssh': ''}))\nsys.stdin.readline()\n"
        "say(json.dumps({'hostname': chr(27) + ']0;owned', 'python': [1]}))\nsys.stdin.readline()\n"
    )
    python.chmod(0o755)
    assert main(["check", "--python", str(python)]) == 1
    out = capsys.readouterr().out
    assert "[!] answers" in out and "its answer about facts is invalid: expected a text in python" in out
    assert plain_lines(out) == out


@pytest.mark.ranks
def test_a_question_about_more_hosts_than_a_pipe_holds_arrives_whole():
    client = ProbeClient(
        Host(name="localhost", slots=1, is_local=True), [sys.executable, "-P", "-m", "megaclass_launch.check.probe"]
    )
    try:
        assert client.ask({"token": client.token}, 30.0) is not None
        peers = [(f"host-{number} 127.0.0.1 1", "127.0.0.1", 1) for number in range(3000)]
        reply = client.ask({"ask": "reach", "peers": peers}, 60.0)
        assert reply is not None and len(reply["faults"]) == 3000
    finally:
        client.wait(2.0)
        client.close(kills_local=True)
