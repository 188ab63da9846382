"""horovodrun's spellings, and what cannot be meant."""

import time
from pathlib import Path

import pytest

from megaclass_launch.errors import LaunchError
from megaclass_launch.options import parse_options
from megaclass_launch.placement import HOROVOD_MARK


def refusal(*arguments, env=None):
    with pytest.raises(LaunchError) as caught:
        parse_options(arguments, env or {})
    return str(caught.value)


@pytest.mark.parametrize("spelling", ["-np", "-n", "--num-proc", "--num-pro"])
def test_the_number_of_processes_has_horovodruns_spellings(spelling):
    assert parse_options([spelling, "16", "python", "train.py"]).num_processes == 16


def test_a_horovodrun_command_line_is_understood_as_it_is():
    text = (
        "-np 4 -H h1:2,h2:2 -p 2222 -i /key --start-timeout 600 --network-interfaces eth0,ib0 --output-filename logs "
        "--prefix-output-with-timestamp --verbose --gloo --log-level INFO bash config.sh -np 7 --verbose"
    )
    options = parse_options(text.split())
    assert options.command == ("bash", "config.sh", "-np", "7", "--verbose")
    assert (options.num_processes, options.hosts, options.ssh_port) == (4, "h1:2,h2:2", 2222)
    assert (options.ssh_identity_file, options.start_timeout_s) == (Path("/key"), 600.0)
    assert (options.interfaces, options.output_dir) == (("eth0", "ib0"), Path("logs"))
    assert options.with_timestamp and options.is_verbose
    assert options.given_env == {"HOROVOD_LOG_LEVEL": "INFO"}


@pytest.mark.parametrize("spelling", ["-hostfile", "--hostfile"])
def test_a_host_file_has_horovodruns_spellings(spelling):
    assert parse_options([spelling, "hosts.txt", "true"]).hostfile == Path("hosts.txt")


@pytest.mark.parametrize(
    "flags",
    [
        ["--gloo"],
        ["--mpi"],
        ["--jsrun"],
        ["--mpi-args=--map-by socket"],
        ["--binding-args=--rankfile r"],
        ["--tcp"],
        ["--disable-cache"],
        ["--log-level", "DEBUG"],
        ["--log-with-timestamp"],
        ["--log-without-timestamp"],
        ["--fusion-threshold-mb", "64"],
        ["--cycle-time-ms", "1"],
        ["--cache-capacity", "2"],
        ["--hierarchical-allreduce"],
        ["--no-hierarchical-allgather"],
        ["--torus-allreduce"],
        ["--autotune"],
        ["--no-autotune"],
        ["--autotune-log-file", "log.csv"],
        ["--autotune-warmup-samples", "1"],
        ["--autotune-steps-per-sample", "5"],
        ["--autotune-bayes-opt-max-samples", "10"],
        ["--autotune-gaussian-process-noise", "0.2"],
        ["--timeline-filename", "t.json"],
        ["--timeline-mark-cycles"],
        ["--no-timeline-mark-cycles"],
        ["--no-stall-check"],
        ["--stall-check"],
        ["--stall-check-warning-time-seconds", "5"],
        ["--stall-check-shutdown-time-seconds", "9"],
        ["--mpi-threads-disable"],
        ["--num-nccl-streams", "2"],
        ["--thread-affinity", "1"],
        ["--gloo-timeout-seconds", "60"],
    ],
    ids=lambda flags: flags[0].split("=")[0],
)
def test_options_that_do_nothing_here_are_accepted_with_one_line(flags):
    options = parse_options(["-np", "2", *flags, "true"])
    assert options.command == ("true",)
    [remark] = options.remarks
    assert remark.startswith(flags[0].split("=")[0]) and "\n" not in remark
    assert "has no effect: " in remark or "is for the ranks, which find it as " in remark


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        ("--fusion-threshold-mb 64", {"HOROVOD_FUSION_THRESHOLD": "67108864"}),
        ("--timeline-mark-cycles", {}),
        (
            "--timeline-filename t --timeline-mark-cycles",
            {"HOROVOD_TIMELINE": "t", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        ),
        ("--no-stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        ("--log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
        ("--no-hierarchical-allreduce", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}),
        ("--tcp", {"NCCL_IB_DISABLE": "1"}),
        ("--autotune-warmup-samples 3", {}),
    ],
)
def test_what_is_for_the_ranks_is_handed_over_by_horovods_variables(flags, env):
    assert parse_options([*flags.split(), "true"]).given_env == env


CONFIG = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 10}
timeline: {filename: from_file.json, mark_cycles: true}
stall_check: {enabled: false}
"""


def test_a_config_file_is_read_and_the_command_line_wins_over_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    arguments = ["--timeline-filename", "typed.json", "--config-file", str(file), "--cycle-time-ms", "20", "true"]
    assert parse_options(arguments).given_env == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "20.0",
        "HOROVOD_TIMELINE": "typed.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("params: {fusion_threshold_mb: -1}", "Fusion_threshold_mb=-1 must be >= 0"),
        ("params: {cycle_time_ms: soon}", "must be a number"),
        ("just words", "has no sections"),
        ("a: [", "Cannot read --config-file"),
    ],
)
def test_a_config_file_that_cannot_be_meant_is_refused(tmp_path, content, says):
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_text(content)
    assert says in refusal("--config-file", str(file), "true")


def test_interfaces_may_be_named_one_by_one():
    options = parse_options(["--network-interface", "eth0", "--network-interface", "ib0,ib1", "true"])
    assert options.interfaces == ("eth0", "ib0", "ib1")


def test_variables_come_from_the_file_from_here_and_from_the_command_line(tmp_path):
    file = tmp_path / "env"
    file.write_text("# keys\nA=from file\n\nB= spaces and = signs \nC=1\n")
    arguments = ["--env-file", str(file), "-x", 'A=it\'s "quoted"\nü', "-x", "HERE", "-x", "EMPTY=", "true"]
    assert parse_options(arguments, {"HERE": "x y"}).given_env == {
        "A": 'it\'s "quoted"\nü',
        "B": " spaces and = signs ",
        "C": "1",
        "HERE": "x y",
        "EMPTY": "",
    }


def test_two_dashes_before_the_command_are_not_part_of_it():
    assert parse_options(["-np", "2", "--", "--odd-name", "--"]).command == ("--odd-name", "--")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-np", "2"], "There is no command to run"),
        (["-np", "0", "true"], "'0' is not a whole number of 1 or more"),
        (["-np", "2.5", "true"], "'2.5' is not a whole number"),
        (["-np", "two", "true"], "'two' is not a whole number"),
        (["-np", "-1", "true"], "-np"),
        (["--heartbeat", "0", "true"], "'0' is not a number of seconds above 0"),
        (["--grace", "nan", "true"], "'nan' is not a number of seconds"),
        (["-H", "a:1", "--hostfile", "f", "true"], "not allowed with argument"),
        (["-x", "=1", "true"], "Cannot read -x '=1'"),
        (["-x", "NOT_SET", "true"], "-x NOT_SET: the variable is not set here"),
        (["--env-file", "/no/such/file", "true"], "Cannot read --env-file /no/such/file: No such file"),
        (["--no-such-option", "true"], "--no-such-option"),
        (["--fusion-threshold-mb", "x", "true"], "--fusion-threshold-mb: invalid int value: 'x'"),
        (["--fusion-threshold-mb", "-1", "true"], "Fusion_threshold_mb=-1 must be >= 0"),
        (["--log-level", "LOUD", "true"], "--log-level: invalid choice: 'LOUD'"),
        (["--host-discovery-script", "./hosts.sh", "true"], "needs --min-np N or -np N"),
        (["--host-discovery-script", "x", "-np", "1", "-H", "a:1", "true"], "leave -H and --hostfile out"),
        (["--min-np", "3", "--max-np", "2", "true"], "--min-np 3 is more than --max-np 2"),
        (["-np", "3", "--max-np", "2", "true"], "-np 3 is more than --max-np 2"),
        (["--blacklist-cooldown-range", "9", "1", "true"], "--blacklist-cooldown-range 9 1: the first number"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, says):
    assert says in refusal(*arguments)


def test_a_line_of_an_env_file_that_cannot_be_read_is_named_but_not_shown(tmp_path):
    file = tmp_path / "env"
    file.write_text("A=1\nsecret\n")
    message = refusal("--env-file", str(file), "true")
    assert f"line 2 of --env-file {file}" in message and "secret" not in message


def test_horovod_only_chooses_the_names_of_variables():
    plain, horovods = (parse_options(["-np", "1", *more, "true"]) for more in ((), ("--horovod",)))
    assert not plain.is_horovod and horovods.is_horovod
    assert set(horovods.given_env) - set(plain.given_env) == {HOROVOD_MARK}


def test_the_help_names_the_launchers_and_the_table_of_what_is_there(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--launcher NAME what starts the processes: ssh, local, mpi, slurm, ray (default: ssh" in text
    assert "-cb, --check-build print the available frameworks, controllers and operations" in text


def test_what_stands_behind_the_command_is_the_commands_own():
    options = parse_options(["-np", "1", "--launcher=mpi", "python", "a.py", "--launcher", "x", "--check-build"])
    assert (options.launcher, options.checks_build) == ("mpi", False)
    assert options.command == ("python", "a.py", "--launcher", "x", "--check-build")


def test_elastic_jobs_have_horovodruns_options():
    text = "--min-num-proc 2 --max-num-proc 8 --slots 4 --elastic-timeout 60 --reset-limit 3 --cooldown-range 1 9"
    options = parse_options([*text.split(), "--host-discovery-script", "./hosts.sh -v", "true"])
    assert options.is_elastic and not options.remarks
    assert (options.min_ranks, options.max_ranks, options.slots_per_host, options.reset_limit) == (2, 8, 4, 3)
    assert (options.elastic_timeout_s, options.cooldown_s) == (60.0, (1.0, 9.0))
    assert options.host_discovery_script == "./hosts.sh -v"


def test_a_minimum_with_excluded_hosts_is_one_of_restarts_and_not_of_an_elastic_job():
    assert not parse_options(
        ["-np", "4", "--min-np", "2", "--exclude-failed-hosts", "--restarts", "2", "true"]
    ).is_elastic
    assert parse_options(["-np", "4", "--min-np", "2", "true"]).is_elastic
    assert not parse_options(["-np", "4", "--reset-limit", "2", "true"]).is_elastic
    assert parse_options(["-np", "4", "--reset-limit", "2", "true"]).restarts == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 40_000, "recursion"),
        ("params: 3\n", "section 'params' is 3, not a list of `key: value`"),
        ("timeline: [a, b]\n", "section 'timeline' is ['a', 'b'], not a list"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nparams: {cycle_time_ms: *b}\n", "must be a number"),
        (
            "timeline: {filename: 2026-11-18}\n",
            "Timeline_filename=datetime.date(2026, 11, 18) must be a text; quote it",
        ),
        ("timeline: {filename: 2026-02-30}\n", "day is out of range for month"),
        ("params: {fusion_threshold_mb: .nan}\n", "Fusion_threshold_mb=nan must be a whole number"),
        ("params: {fusion_threshold_mb: .inf}\n", "Fusion_threshold_mb=inf must be a whole number"),
        ("params: {cycle_time_ms: .nan}\n", "Cycle_time_ms=nan must be a number"),
        ("params: {hierarchical_allreduce: perhaps}\n", "Hierarchical_allreduce='perhaps' must be true or false"),
        ("\xff: \x00", "Cannot read --config-file"),
    ],
)
def test_a_config_file_that_cannot_be_meant_is_refused_with_a_reason(tmp_path, text, says):
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="latin-1")
    begun = time.process_time()
    message = refusal("--config-file", str(file), "true")
    assert says in message and len(message) < 500
    assert time.process_time() - begun < 5.0


def test_a_failure_has_a_short_grace_and_a_signal_one_in_which_ranks_can_save():
    options = parse_options(["-np", "1", "true"])
    assert (options.fault_grace_s, options.signal_grace_s) == (3.0, 30.0)
    options = parse_options(["-np", "1", "--grace", "9", "true"])
    assert (options.fault_grace_s, options.signal_grace_s) == (9.0, 9.0)
