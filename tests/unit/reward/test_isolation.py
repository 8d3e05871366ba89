"""What reward code can do beyond judging, by ``reward.isolation``, and by which means of Linux."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from nouns import completion, episode

from ostinato.reward import isolation, worker
from ostinato.reward.isolation import Mode, drop_secrets
from ostinato.reward.workers import WorkerGrader
from ostinato.types import Group, Prompt, Reward

REWARDS = '''
import fcntl, multiprocessing, os, socket, subprocess, sys, tempfile, time
from pathlib import Path

def connects(completions, port, **columns):
    try:
        socket.create_connection(("127.0.0.1", port[0]), timeout=30).close()
    except OSError as error:
        raise RuntimeError("Connection error.") from error  # as client libraries do
    return [1.0]

def writes(completions, place, **columns):
    Path(place[0]).with_name("written").write_text("x")
    return [1.0]

def reads(completions, place, **columns):
    return [float(Path(place[0]).read_text())]

def secrets(completions, **columns):
    inherited = Path("/proc/self/environ").read_bytes() + repr(os.environ).encode()
    return [float(inherited.count(b"much too secret"))]

def works(completions, **columns):
    """What ordinary rewards need: temporary files, programs, semaphores, /dev/null."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    return [float(subprocess.run(["true"], stdout=subprocess.DEVNULL).returncode)]

def leaves(completions, place, **columns):
    """A process in a session of its own holds a lock for as long as it lives; its id is the reward."""
    with open(place[0]) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        child = subprocess.Popen(command, pass_fds=[file.fileno()], start_new_session=True)
        return [float(child.pid)]

def ends(completions, place, **columns):
    leaves(completions, place)
    how = completions[0]
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), {"kill": 9, "abort": 6, "term": 15}[how])
    return [1.0]
'''
NAMES = ("connects", "writes", "reads", "secrets", "works", "leaves")


@cache
def means() -> frozenset[str]:
    """Those that the kernel and this user have: tried in a process of one thread."""
    code = (
        "import sys, tempfile; sys.path.insert(0, sys.argv[1]); from ostinato.reward import isolation as i;"
        "d = tempfile.mkdtemp();"
        "tried = {'namespaces': lambda: i._try_namespaces(d), 'seccomp': i._apply_seccomp,"
        "'landlock': lambda: i._apply_landlock(d)};"
        "print(*[name for name, one in tried.items() if i._can_confine(one)])"
    )
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    return frozenset(ran.stdout.split())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "place").write_text("7")
    return tmp_path / "rewards.py"


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def group(port: int, place: Path, text: str = "a") -> Group:
    prompt = Prompt(uid="p", text="?", columns={"port": port, "place": str(place)})
    return Group(prompt=prompt, trajectories=(episode(completion(1, text=text)),), step=0)


def graded(grader: WorkerGrader, port: int, file: Path) -> Reward:
    (reward,) = asyncio.run(grader.grade(group(port, file.with_name("place"))))
    return reward


def is_locked(place: Path) -> bool:
    """Is there still a process that holds the lock?"""
    with place.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_for_lock(place: Path) -> None:
    """Until no process holds it: an alarm ends the wait, long after any process has died."""
    signal.alarm(60)
    try:
        with place.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_rewards_judge_and_do_nothing_else(
    file: Path, port: int, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward read HF_TOKEN from its environment, sent it over the network, wrote into the run folder and
    left a process of its own session behind, which went on."""
    if not means() >= {"namespaces"} and not means() >= {"seccomp", "landlock"}:
        pytest.skip("this kernel gives this user neither namespaces nor seccomp and landlock")
    monkeypatch.setenv("HF_TOKEN", "much too secret")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:much too secret@host/db".replace(" ", "%20"))
    with WorkerGrader([f"{file}:{name}" for name in NAMES], isolation=mode) as grader:
        grader.check()
        assert not grader.left_open
        folder = Path(grader._workers[0]._own_folder)
        reward = graded(grader, port, file)
        parts, reason = reward.parts, reward.reason
        assert is_locked(file.with_name("place"))
    assert (parts["connects"], parts["writes"]) == (None, None)
    assert reason.count('reward.isolation="off"') == 2, reason
    assert (parts["reads"], parts["secrets"], parts["works"]) == (7, 0, 0)
    assert parts["leaves"]
    wait_for_lock(file.with_name("place"))
    assert not folder.exists()
    assert not file.with_name("written").exists()


def test_off_leaves_rewards_all_that_the_run_has(
    file: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "much too secret")
    with WorkerGrader([f"{file}:{name}" for name in NAMES], isolation="off") as grader:
        parts = graded(grader, port, file).parts
    assert (parts["connects"], parts["writes"], parts["secrets"]) == (1, 1, 2)
    assert is_locked(file.with_name("place"))
    os.kill(int(parts["leaves"] or 0), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("exit", "died: ends: exit status 3"),
        ("kill", "died: ends: killed by signal 9"),
        ("abort", "died: ends: killed by signal 6"),
        ("hang", "timeout: ends: no verdict in 1 s"),
    ],
)
def test_how_a_confined_worker_ends_is_told_as_before(file: Path, how: str, detail: str) -> None:
    """The first process of a namespace would ignore its own SIGKILL and hide the status of others; what a
    reward has started ends with it, also in a session of its own."""
    place = file.with_name("place")
    with WorkerGrader([f"{file}:ends"], timeout_s=1 if how == "hang" else 60) as grader:
        grader.check()
        (reward,) = asyncio.run(grader.grade(group(0, place, how)))
        assert reward.reason == detail
        wait_for_lock(place)


@pytest.mark.parametrize("used", [("namespaces",), ("seccomp", "landlock"), ()])
def test_each_means_by_itself(file: Path, port: int, used: tuple[str, ...]) -> None:
    """Where user namespaces are forbidden (containers), seccomp and landlock take their place; descendants
    are found and killed with no means at all. Without a grader: that would use the best that there is."""
    if lacking := set(used) - means():
        pytest.skip(f"this kernel gives this user no {' and '.join(lacking)}")
    code = f"""
import json, os, sys, tempfile
sys.path[:0] = {[str(Path(__file__).parents[3]), str(file.parent)]!r}
from ostinato.reward import isolation
import rewards
os.environ["TMPDIR"] = tempfile.mkdtemp(dir={str(file.parent)!r})
columns = {{"port": [{port}], "place": [{str(file.with_name("place"))!r}]}}
isolation.enter_isolation({used!r}, os.environ["TMPDIR"], os.getppid(), lambda: None)
found = {{}}
for name in {NAMES!r}:
    try:
        found[name] = getattr(rewards, name)([""], **columns)[0]
    except Exception as error:
        found[name] = None
print(json.dumps(found), flush=True)
os._exit(5)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 5, ran.stderr
    found = json.loads(ran.stdout)
    confined = bool(used)
    assert (found["connects"], found["writes"]) == ((None, None) if confined else (1, 1))
    assert (found["reads"], found["works"]) == (7, 0)
    assert found["leaves"]
    wait_for_lock(file.with_name("place"))


def test_no_folder_is_left_where_the_trainer_was_killed_at_once(tmp_path: Path) -> None:
    """A worker that had no call yet had no keeper, and its folder stayed in /tmp."""
    folder = tmp_path / "own"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    ours.close()
    command = [sys.executable, "-P", worker.__file__, str(theirs.fileno()), str(folder)]
    with theirs:
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=120, check=False).returncode == 0
    assert not folder.exists()


def test_what_cannot_be_prevented_is_named_and_refused_by_strict() -> None:
    assert isolation.list_gaps(["namespaces"]) == isolation.list_gaps(["seccomp", "landlock"]) == []
    open_files = isolation.list_gaps(["seccomp"])
    assert open_files == ["write outside of their temporary folder"]
    isolation.refuse_gaps([])
    with pytest.raises(ValueError, match=r'reward.isolation is "strict", but .* write outside .* use "auto"'):
        isolation.refuse_gaps(open_files)


def test_secrets_are_known_by_their_names_and_by_passwords_in_addresses() -> None:
    kept = {"PATH": "/bin", "HOME": "/root", "PWD": "/", "TOKENIZERS_PARALLELISM": "false", "LC_ALL": "C"}
    kept |= {"HTTP_PROXY": "http://proxy:3128", "OMP_NUM_THREADS": "1", "PYTHONPATH": "a:b"}
    secret = ["OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "GITHUB_PAT", "MYSQL_PWD"]
    secret += ["GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "wandb_api_key", "SENTRY_DSN"]
    environ = kept | dict.fromkeys(secret, "x") | {"HTTPS_PROXY": "http://me:word@proxy:3128"}
    assert drop_secrets(environ) == kept
