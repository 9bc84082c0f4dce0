"""What each launcher's variables say of the job, and what is refused."""

import pytest

from .job import Job, find_job, find_job_or, job_at

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}  # fmt: skip


@pytest.mark.parametrize(
    "environment, launcher, host, port",
    [
        (TORCHRUN, "torchrun", "10.0.0.1", 29500),
        (OPEN_MPI, "Open MPI", "10.96.0.1", 61440 + 1531576320 // 4096 % 4096),
        (SLURM, "SLURM", "gpu007", 61440 + 7 * 16 + 1),
        (SLURM | OPEN_MPI | TORCHRUN, "torchrun", "10.0.0.1", 29500),  # the innermost launcher counts
        (SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}, "SLURM", "10.0.0.9", 1234),
    ],
)
def test_a_launcher_is_recognised(environment, launcher, host, port):
    assert find_job(environment) == Job(launcher, 4, 3, 2, 1, 2, host, port)


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n1,n4", "n1"), ("a[001-4],b2", "a001"), ("a[7,9-12]", "a7"), ("r[1-2]-ib", "r1-ib")],
)
def test_the_first_host_of_a_step_coordinates(nodes, first):
    assert find_job(SLURM | {"SLURM_STEP_NODELIST": nodes}).host == first


def test_a_job_on_one_host_stays_on_loopback():
    here = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert find_job(SLURM | here).host == "127.0.0.1"
    assert find_job(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).host == "127.0.0.1"


def test_tasks_of_each_host_may_differ():
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert find_job(uneven).num_local_processes == 1


def test_ranks_set_by_hand_under_srun_take_their_place_on_the_host_from_it():
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    job = find_job(SLURM | by_hand)
    assert (job.local_process_id, job.num_local_processes) == (1, 2)


def test_a_batch_script_is_in_no_job():
    assert find_job({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None


@pytest.mark.parametrize(
    "num_local, local, num_visible, devices",
    [(1, 0, 8, list(range(8))), (8, 5, 8, [5]), (8, 5, 1, [0]), (2, 1, 8, [1]), (4, 3, 0, [])],
)
def test_devices_follow_from_the_launcher(num_local, local, num_visible, devices):
    assert Job("SLURM", 16, 0, num_local, local, 2, "n0", 1).local_devices(num_visible) == devices


def test_two_processes_do_not_share_a_device():
    with pytest.raises(ValueError, match=r"num_local_processes \(=8\) must be at most the devices .* \(=4\)"):
        Job("SLURM", 8, 5, 8, 5, 1, "n0", 1).local_devices(4)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT must be set, as RANK, WORLD_SIZE is"),
        (TORCHRUN | {"RANK": "4"}, r"process_id \(=4\) must be at least 0 and below num_processes \(=4\)"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, r"WORLD_SIZE \(='four'\) must be a number"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, r"SLURM_STEP_TASKS_PER_NODE \(='2'\)"),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}, "MASTER_ADDR must name the host of process 0"),
    ],
)
def test_half_a_job_is_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        find_job(environment)


@pytest.mark.parametrize("address", ["localhost", ":80", "host:", "host:http", "host:70000"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ValueError, match="must be host:port"):
        job_at(address, 2, 0)


def test_an_address_comes_with_both_numbers():
    assert find_job_or("n0:1234", 2, 1) == job_at("n0:1234", 2, 1)
    with pytest.raises(
        ValueError, match=r"^coordinator_address, num_processes and process_id \(=.*\) are given all or"
    ):
        find_job_or("n0:1234", 2, None)
