"""Who is missing, who is there twice, who is a stranger, and who brings something else."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .job import Job
from .roll_call import meet


def make_job(process_id=0, num_processes=2, host="127.0.0.1", port=None, token="secret"):
    if port is None:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    return Job("address", num_processes, process_id, 1, 0, 2, host, port, token=token)


def join(job, alike=None, timeout_s=20.0):
    """What a process is told; None if it has met the others."""
    try:
        for connection in meet(job, alike or {}, timeout_s).values():
            connection.close()
    except ValueError as error:
        return str(error)


def join_all(jobs, alike=({}, {}), timeout_s=20.0):
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(join, jobs, alike, [timeout_s] * len(jobs)))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_all_that_come_and_agree_go_on(host):
    first = make_job(0, 4, host)
    jobs = [first._replace(process_id=index) for index in range(4)]
    assert join_all(jobs, [{"jax": "1"}] * 4) == [None] * 4


def test_processes_that_disagree_all_get_the_reason():
    first = make_job()
    said = join_all([first, first._replace(process_id=1)], [{"jax": "1"}, {"jax": "2"}])
    assert said == ["jax (='2' in process 1) must be '1', as in process 0"] * 2


def test_the_missing_are_named():
    first = make_job(0, 4)
    said = join_all([first, first._replace(process_id=2)], timeout_s=0.5)
    assert said[0] == said[1] and said[0].startswith("process 1, 3 of 4 must join at 127.0.0.1:")


def hello(job, **changed):
    said = {"token": job.token, "process_id": job.process_id, "num_processes": job.num_processes, "alike": {}}
    return json.dumps(said | changed).encode()


def framed(said):
    return len(said).to_bytes(4, "big") + said


def call(job, said, until_it_listens=10.0):
    """Connects to process 0, says something, and gives the answer."""
    deadline = time.monotonic() + until_it_listens
    while True:
        try:
            with socket.create_connection((job.host, job.port), timeout=10) as stranger:
                stranger.sendall(said)
                return stranger.recv(1000)[4:].decode()
        except ConnectionResetError:
            return ""
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


STRANGERS = {
    "another protocol": lambda job: b"GET / HTTP/1.0\r\n\r\n",
    "deep JSON": lambda job: framed(b"[" * 50_000),
    "too long": lambda job: (2**30).to_bytes(4, "big"),
    "a list": lambda job: framed(b"[]"),
    "an object for the token": lambda job: framed(hello(job, token={})),
    "an object for a number": lambda job: framed(hello(job, process_id={})),
    "a number for an object": lambda job: framed(hello(job, process_id=1, alike=1)),
    "without the token": lambda job: framed(hello(job, process_id=1, token="guess")),
    "of a larger job": lambda job: framed(hello(job, process_id=1, num_processes=3)),
    "one more": lambda job: framed(hello(job, process_id=2)),
    "another first": lambda job: framed(hello(job)),
}


def test_strangers_are_sent_away_and_the_meeting_goes_on(capfd):
    job = make_job()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, job)
        answers = [call(job, said(job)) for said in STRANGERS.values()]
        assert pool.submit(join, job._replace(process_id=1)).result() is None
        assert first.result() is None
    assert "num_processes (=3 in process 1) must be 2, as in process 0" in answers
    refused = [line for line in capfd.readouterr().err.splitlines() if "is refused at" in line]
    assert len(refused) == len(STRANGERS)


def test_a_second_process_of_a_number_is_sent_away():
    job = make_job(0, 3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, job)
        call(job, b"GET ")  # until it listens
        with socket.create_connection((job.host, job.port)) as second:
            second.sendall(framed(hello(job, process_id=1)))
            time.sleep(0.5)
            assert "two have joined" in call(job, framed(hello(job, process_id=1)))
            assert pool.submit(join, job._replace(process_id=2)).result() is None
            assert first.result() is None


def test_a_stranger_that_says_nothing_holds_nobody():
    job = make_job()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(join, job, None, 3.0)
        call(job, b"GET ")
        with socket.create_connection((job.host, job.port), timeout=10) as stranger:
            stranger.sendall(b"\0")
            assert first.result().startswith("process 1 of 2 must join")


def test_nobody_answers_and_a_port_that_is_taken():
    job = make_job(1)
    said = join(job, timeout_s=0.2)
    assert said.startswith(f"coordinator 127.0.0.1:{job.port} of process 0 must answer within 0.2 s: ")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "cannot listen" in join(job._replace(process_id=0, port=server.getsockname()[1]))
