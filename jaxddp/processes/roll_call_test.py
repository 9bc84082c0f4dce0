"""Who is missing, who is there twice, who is a stranger, and who brings something else."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxddp.conftest import free_port

from . import roll_call
from .job import Job
from .roll_call import meet


def make_job(process_id=0, num_processes=2, host="127.0.0.1", port=None, token="secret"):
    return Job("address", num_processes, process_id, 1, 0, 2, host, port or free_port(host), token=token)


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
    first = make_job()
    said = join_all([first, first._replace(process_id=1, num_processes=3)])
    assert said == ["num_processes (=3 in process 1) must be 2, as in process 0"] * 2


def test_the_missing_are_named():
    first = make_job(0, 4)
    said = join_all([first, first._replace(process_id=2)], timeout_s=0.5)
    assert said[0] == said[1] and said[0].startswith("process 1, 3 of 4 must join at 127.0.0.1:")


def hello(job, token="secret", number=1, alike=None):
    alike = {"num_processes": job.num_processes} if alike is None else alike
    return framed(json.dumps((token, number, alike)).encode())


def framed(said):
    return len(said).to_bytes(4, "big") + said


def call(job, said, until_it_listens=10.0):
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
    "an object for the token": lambda job: hello(job, token={}),
    "an object for a number": lambda job: hello(job, number={}),
    "a number for an object": lambda job: hello(job, alike=1),
    "without the token": lambda job: hello(job, token="guess"),
    "one more": lambda job: hello(job, number=2),
    "another first": lambda job: hello(job, number=0),
}


def test_strangers_are_sent_away_and_the_meeting_goes_on(capfd):
    job = make_job()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, job)
        for said in STRANGERS.values():
            call(job, said(job))
        assert pool.submit(join, job._replace(process_id=1)).result() is None
        assert first.result() is None
    refused = [line for line in capfd.readouterr().err.splitlines() if "is refused at" in line]
    assert len(refused) == len(STRANGERS)


def test_a_second_process_of_a_number_is_sent_away():
    job = make_job(0, 3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, job)
        call(job, b"GET ")  # until it listens
        with socket.create_connection((job.host, job.port)) as second:
            second.sendall(hello(job))
            time.sleep(0.5)
            assert "two have joined" in call(job, hello(job))
            assert pool.submit(join, job._replace(process_id=2)).result() is None
            assert first.result() is None


def test_a_stranger_that_never_ends_its_message_does_not_hold_the_meeting():
    job = make_job()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, job)
        call(job, b"GET ")  # until it listens
        with socket.create_connection((job.host, job.port), timeout=10) as stranger:
            stranger.sendall((100).to_bytes(4, "big"))
            assert pool.submit(join, job._replace(process_id=1)).result() is None
            assert first.result() is None


def test_a_stranger_that_never_ends_its_answer_does_not_hold_a_process(monkeypatch):
    monkeypatch.setattr(roll_call, "_LATE_S", 0.5)
    job = make_job(1)
    with socket.create_server((job.host, job.port)) as stranger, ThreadPoolExecutor(1) as pool:
        process = pool.submit(join, job, timeout_s=0.5)
        caller, _ = stranger.accept()
        with caller:
            caller.sendall((100).to_bytes(4, "big"))
            with contextlib.suppress(BrokenPipeError):
                for _ in range(10):
                    time.sleep(0.2)
                    caller.sendall(b" ")
            assert "must answer within 0.5 s: " in process.result(timeout=5)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "cannot listen" in join(make_job(port=server.getsockname()[1]))
