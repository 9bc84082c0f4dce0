"""Who is missing, who is there twice, and who brings something else: one line, the same for every process."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .job import Job
from .roll_call import meet


def roll_call(*arguments):
    for connection in meet(*arguments).values():
        connection.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call_all(processes, num_processes=None, timeout_s=20.0):
    """Each process's error, or None; ``processes`` are ``(process_id, alike, devices)``."""
    port, count = free_port(), num_processes or len(processes)

    def one(process):
        process_id, alike, devices = process
        job = Job("address", count, process_id, count, process_id, 1, "127.0.0.1", port)
        try:
            return roll_call(job, alike, devices, timeout_s)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_all_that_come_and_agree_go_on():
    assert call_all([(index, {"jax": "1"}, [str(index)]) for index in range(4)]) == [None] * 4


@pytest.mark.parametrize(
    "processes, message",
    [
        ([(0, {"jax": "1"}, []), (1, {"jax": "2"}, [])], "jax (='2' in process 1) must be '1', as in process 0"),
        (
            [(0, {}, ["0", "1"]), (1, {}, ["1"])],
            f"GPU 1 of {socket.gethostname()} must be one process's: 0 and 1 both take it",
        ),
    ],
)
def test_processes_that_disagree_all_get_the_reason(processes, message):
    assert call_all(processes) == [message] * 2


def test_a_process_of_a_larger_job_is_told_the_size():
    port = free_port()
    jobs = [Job("address", 2, 0, 1, 0, 2, "127.0.0.1", port), Job("address", 4, 3, 1, 0, 2, "127.0.0.1", port)]
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(roll_call, job, {}, [], 20.0) for job in jobs]:
            with pytest.raises(ValueError, match=r"^num_processes \(=4 in process 3\) must be 2, as in process 0$"):
                call.result()


def test_one_number_twice():
    errors = call_all([(0, {}, []), (1, {}, []), (1, {}, [])], num_processes=4, timeout_s=2.0)
    assert errors.count("process_id (=1) must be one process's: two have joined under it") >= 2


def test_the_missing_are_named():
    errors = call_all([(0, {}, []), (2, {}, [])], num_processes=4, timeout_s=0.5)
    assert len(set(errors)) == 1 and errors[0].startswith("process 1, 3 of 4 must join at 127.0.0.1:")


def test_strangers_do_not_disturb():
    job = Job("address", 2, 0, 1, 0, 2, "127.0.0.1", free_port())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(roll_call, job, {}, [], 20.0)
        for said in (b"GET / HTTP/1.0\r\n\r\n", b'{"process_id": [1]}\n', b"[]\n", b""):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection((job.host, job.port), timeout=1) as stranger:
                        stranger.sendall(said)
                    break
                except OSError:
                    time.sleep(0.02)
        pool.submit(roll_call, job._replace(process_id=1), {}, [], 20.0).result()
        first.result()


def test_nobody_answers_and_a_port_that_is_taken():
    job = Job("address", 2, 1, 1, 0, 2, "127.0.0.1", free_port())
    with pytest.raises(ValueError, match=rf"^coordinator 127.0.0.1:{job.port} of process 0 must answer within 0.2 s: "):
        roll_call(job, {}, [], 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = job._replace(process_id=0, port=server.getsockname()[1])
        with pytest.raises(ValueError, match="cannot listen .*: set MASTER_ADDR and MASTER_PORT"):
            roll_call(taken, {}, [], 0.2)
