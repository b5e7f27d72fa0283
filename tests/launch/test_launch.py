"""Launch: hosts, specs, command lines, bounded waits that name who is missing, security of the cluster it starts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_helper import HOSTS, request, spec_of, with_launch

from mula_ray.config.environment import rank_block, ray_block
from mula_ray.config.errors import CannotContinue, UserError
from mula_ray.config.site import NetworkSpec, load_site
from mula_ray.launch import bring_up
from mula_ray.launch.agent import Agent, own_index
from mula_ray.launch.bring_up import Cluster
from mula_ray.launch.hosts import Host, find_hosts, is_this_machine, job_number, own_address
from mula_ray.launch.run import driver_command, plan_hosts
from mula_ray.launch.spec import check_temp_root, ports_of, write_json
from tests.conftest import Cli

# --- hosts ---


def test_hosts_from_a_list_a_file_and_the_batch_system(tmp_path: Path) -> None:
    site = load_site("local")
    assert find_hosts(site, "a=10.0.0.1,b=10.0.0.2", None, {}) == [Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]
    file = tmp_path / "nodes"
    file.write_text("a=10.0.0.1\na=10.0.0.1\nb=10.0.0.2\n")  # PBS repeats a node for each of its slots
    for found in (find_hosts(site, None, file, {}), find_hosts(site, None, None, {"PBS_NODEFILE": str(file)})):
        assert [host.name for host in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("listed", "part"),
    [
        ("a=10.0.0.1,a=10.0.0.1", "names a=10.0.0.1 twice"),
        ("a=10.0.0.1,b=10.0.0.1", "a and b have the same address 10.0.0.1"),
        ("no-such-host.invalid", "no-such-host.invalid has no address"),
        (None, "not inside a PBS or Slurm job"),
    ],
)
def test_bad_host_lists(listed: str | None, part: str) -> None:
    with pytest.raises(UserError, match=part):
        find_hosts(load_site("local"), listed, None, {})


def test_the_fast_network_gives_the_address() -> None:
    with pytest.raises(UserError, match=r"x1234\.hsn\.cm\.aurora\.alcf\.anl\.gov has no address"):
        find_hosts(load_site("aurora"), "x1234.hostmgmt", None, {})


def test_own_machine() -> None:
    assert is_this_machine(Host("me", own_address()))
    assert not is_this_machine(Host("other", "192.0.2.77"))


def test_job_numbers_pick_ports_outside_rays_own() -> None:
    assert job_number("4711.aurora-pbs", {}) == 4711
    assert job_number(None, {"SLURM_JOB_ID": "88"}) == 88
    for job in range(250):
        ports = ports_of(NetworkSpec(), job)
        assert all(port < 10002 or 19999 < port < 32768 for port in ports.values())
        assert len(set(ports.values())) == len(ports)
    assert not set(ports_of(NetworkSpec(), 1).values()) & set(ports_of(NetworkSpec(), 2).values())


def test_long_temporary_folders_are_refused() -> None:
    check_temp_root("/tmp", 12345678, 10000)
    with pytest.raises(UserError, match="107"):
        check_temp_root("/var/spool/pbs/jobs/tmpdir/of/somebody", 12345678, 10000)


# --- what is started ---


def test_mpiexec_starts_one_agent_a_node(tmp_path: Path) -> None:
    site = load_site("aurora")
    (command,) = Cluster(spec_of(tmp_path, site), site.launch).commands(Path("/r/spec.json"))
    assert command[:7] == ["mpiexec", "-n", "4", "-ppn", "1", "--cpu-bind", "none"]
    assert command[7:] == [sys.executable, "-m", "mula_ray.launch.agent", "/r/spec.json"]


def test_each_starts_one_command_a_host_quoted_for_remote_shells(tmp_path: Path) -> None:
    site = load_site("local")
    here = Host("here", own_address())
    spec = spec_of(tmp_path, site, hosts=(here, *HOSTS[1:]))
    commands = list(Cluster(spec, site.launch).commands(Path("/a run/spec.json")))
    assert commands[0][0] == sys.executable
    assert commands[1][0] == "ssh"
    assert commands[1][-2] == "a"
    assert commands[1][-1].endswith("-m mula_ray.launch.agent '/a run/spec.json' --host a")


def test_ray_arguments(tmp_path: Path) -> None:
    site = load_site("aurora")
    spec = spec_of(tmp_path, site)
    head, worker = Agent(spec, 0).ray_arguments(), Agent(spec, 1).ray_arguments()
    ports = ports_of(site.network, 4711)
    for wanted in (
        *("--head", "--num-cpus=0", "--num-gpus=0", f"--port={ports['gcs']}", "--include-dashboard=false"),
        *("--disable-usage-stats", "--node-ip-address=10.0.0.1", '--resources={"tile": 2}'),
    ):
        assert wanted in head
    assert f"--address=10.0.0.1:{ports['gcs']}" in worker
    assert f"--temp-dir=/tmp/mr-{os.getuid()}-4711-1" in worker
    dedicated = Agent(spec_of(tmp_path / "2", with_launch(site, head="dedicated")), 0)
    assert "--resources={}" in dedicated.ray_arguments()


def test_the_dashboard_listens_on_loopback_only(tmp_path: Path) -> None:
    arguments = Agent(spec_of(tmp_path, load_site("aurora"), job_server=True), 0).ray_arguments()
    assert "--dashboard-host=127.0.0.1" in arguments


def test_agents_find_themselves(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, load_site("local"), hosts=(*HOSTS, Host("me", own_address())))
    assert own_index(spec, "b") == 2
    assert own_index(spec, None) == 4
    with pytest.raises(SystemExit, match="nobody"):
        own_index(spec, "nobody")


def test_driver_command(tmp_path: Path) -> None:
    command = driver_command(request(tmp_path, load_site("aurora")), "10.0.0.1:20220", "must")
    text = " ".join(command)
    for part in (
        "train mula-tiny",
        "--address 10.0.0.1:20220",
        "--resume must",
        "cluster.nodes=2",
        "cluster.kind=aurora",
    ):
        assert part in text


def test_spares_are_what_is_left() -> None:
    aurora, local = load_site("aurora"), load_site("local")
    assert plan_hosts(aurora, 262, 256, 6) == 6
    assert plan_hosts(local, 5, 2, 2) == 2
    with pytest.raises(UserError, match=r"2 hosts, but the run needs 2 working nodes and one for the head; ask for 5"):
        plan_hosts(local, 2, 2, 2)


# --- environments, from the one place ---


def test_ray_block_of_aurora() -> None:
    block = ray_block(load_site("aurora"), 300, temp_dir="/tmp/x", token_file="/run/token", hosts=["10.0.0.1"])
    environment = block.apply({"ONEAPI_DEVICE_SELECTOR": "x", "http_proxy": "p", "HTTPS_PROXY": "p", "HOME": "/h"})
    assert "ONEAPI_DEVICE_SELECTOR" not in environment
    assert "http_proxy" not in environment
    assert "HTTPS_PROXY" not in environment
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/token"
    assert environment["RAY_gcs_server_num_threads"] == "8"
    assert "10.0.0.1" in environment["NO_PROXY"]
    assert environment["HOME"] == "/h"
    small = ray_block(load_site("aurora"), 16, temp_dir="/tmp/x", token_file=None).set
    assert "RAY_num_server_call_thread" not in small
    assert small["RAY_AUTH_MODE"] == "disabled"


def test_rank_blocks_of_aurora_for_both_ways_of_starting() -> None:
    site = load_site("aurora")
    by_ray = rank_block(site, 256, local_rank=3, local_size=12).set
    by_mpi = rank_block(site, 256, local_rank=3, local_size=12, start="mpi").set
    assert by_ray["CCL_PROCESS_LAUNCHER"] == "none"
    assert (by_ray["CCL_LOCAL_RANK"], by_ray["CCL_LOCAL_SIZE"]) == ("3", "12")
    assert "CCL_KVS_MODE" not in by_ray
    assert by_ray["CCL_KVS_IFACE"] == by_ray["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert by_mpi["CCL_PROCESS_LAUNCHER"] == "pmix"
    assert by_mpi["CCL_KVS_MODE"] == "mpi"
    assert by_mpi["CCL_KVS_USE_MPI_RANKS"] == "1"
    for block in (by_ray, by_mpi):
        assert block["ZE_AFFINITY_MASK"] == "3"
        assert block["CCL_KVS_CONNECTION_TIMEOUT"] == "600"
        assert block["CCL_BCAST"] == "double_tree"
        assert "CCL_OP_SYNC" not in block
    assert rank_block(site, 256, local_rank=0, local_size=12, workarounds=True).set["CCL_OP_SYNC"] == "1"
    assert "CCL_BCAST" not in rank_block(site, 16, local_rank=0, local_size=12).set


def test_cores_leave_the_system_its_own() -> None:
    from mula_ray.config.site import parse_cores

    cores = [parse_cores(text) for text in load_site("aurora").node.cores]
    assert len(cores) == 12
    assert not set.union(*map(set, cores)) & {0, 52, 104, 156}
    assert sum(len(part) for part in cores) == len(set.union(*map(set, cores)))


# --- waits ---


class FakeProbe:
    """Stands for Ray's own view of the cluster."""

    nodes: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        self.latest = {"nodes": [{"address": address, "tiles": 2} for address in self.nodes]}

    def __enter__(self) -> FakeProbe:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Head and three hosts of which two are needed; nothing is started, Ray's view is faked."""
    site = with_launch(load_site("local"), bring_up_s=0.5, shutdown_s=0.2, command=["true"])
    monkeypatch.setattr(bring_up, "_Probe", FakeProbe)
    made = Cluster(spec_of(tmp_path, site), site.launch)
    monkeypatch.setattr(made, "commands", lambda _path: iter(()))
    with made:
        yield made


def say(cluster: Cluster, host: str, state: str, reason: str = "", machine: str | None = None) -> None:
    write_json(
        cluster.folder / "agents" / f"{host}.json", {"state": state, "reason": reason, "machine": machine or host}
    )


def test_waiting_ends_when_all_are_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "nodes", tuple(host.address for host in HOSTS))
    assert cluster.wait(2) == []


def test_missing_hosts_are_named_with_what_is_known(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "nodes", ("10.0.0.1", "10.0.0.2"))
    say(cluster, "head", "head")
    say(cluster, "b", "failed", "ray start ended with 1: port taken")
    started = time.monotonic()
    with pytest.raises(CannotContinue) as caught:
        cluster.wait(2)
    assert time.monotonic() - started < 5
    message = str(caught.value)
    assert "1 of the 2 needed working nodes" in message
    assert "missing: b, c" in message
    assert "b (10.0.0.3): failed ray start ended with 1: port taken" in message
    assert "c (10.0.0.4): its agent never started" in message


def test_a_missing_spare_is_no_reason_to_stop(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "nodes", ("10.0.0.1", "10.0.0.2", "10.0.0.4"))
    assert [host.name for host in cluster.wait(2)] == ["b"]


def test_without_the_head_nothing_goes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "nodes", ("10.0.0.2", "10.0.0.3", "10.0.0.4"))
    with pytest.raises(CannotContinue, match="missing: head"):
        cluster.wait(2)


def test_one_machine_under_two_names_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "nodes", tuple(host.address for host in HOSTS))
    say(cluster, "a", "joining", machine="m1")
    say(cluster, "c", "joining", machine="m1")
    with pytest.raises(CannotContinue, match="hosts a and c are one machine"):
        cluster.wait(2)


def test_real_exit_code_and_signals(cluster: Cluster) -> None:
    for code in (0, 10, 30):
        assert cluster.run([sys.executable, "-c", f"raise SystemExit({code})"]) == code
    assert cluster.run(["bash", "-c", "kill -9 $$"]) == 137


def test_files_are_for_the_owner_only(tmp_path: Path, cluster: Cluster) -> None:
    assert cluster.folder.stat().st_mode & 0o077 == 0
    token = tmp_path / "run" / "launch" / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() not in (cluster.folder / "spec.json").read_text()


def test_injected_faults_are_refused_unless_asked_for_twice(cli: Cli) -> None:
    result = cli("launch", "mula-tiny", "--site", "local", "--hosts", "a=10.0.0.1", "--inject", "kill-rank@step=2")
    assert result.code == 20
    assert "--i-mean-it" in result.err


def test_launch_refuses_too_few_hosts(cli: Cli, tmp_path: Path) -> None:
    result = cli("launch", "mula-tiny", "--site", "local", "--hosts", "a=10.0.0.1", "--run-dir", tmp_path / "r")
    assert result.code == 20
    assert "1 hosts, but the run needs 2 working nodes and one for the head" in result.err
    assert not (tmp_path / "r").exists()


def test_existing_needs_an_address(cli: Cli) -> None:
    result = cli("launch", "mula-tiny", "--site", "local", "--method", "existing")
    assert result.code == 20
    assert "--address" in result.err
