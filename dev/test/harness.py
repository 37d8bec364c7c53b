"""The few words a Python test of a whole program needs; prints what the C tests print: `make test` adds up both.

A test is a function named after its claim, marked @test; the file ends with `main()`:

    from harness import *

    @test
    def same_seed_gives_the_same_bytes():
        run(["./train_moe_cpu", "--model", "tiny", "--out", folder("a")])
        check(read(folder("a") + "/x") == read(folder("b") + "/x"), "the files differ")

    main()

`python3 file.py part` runs only the tests whose name contains part.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_tests = []
_folder = None  # of the test that runs now
_folder_lock = threading.Lock()


def test(function):
    """Marks a test."""
    _tests.append(function)
    return function


class Failure(Exception):
    """What a failed check raises: the message is the reason."""


def check(condition, reason):
    """Fails the test unless condition holds. Write comparisons so that NaN fails: check(diff <= tol, ...)."""
    if not condition:
        raise Failure(reason)


def check_near(a, b, tol, what):
    check(abs(a - b) <= tol, f"{what}: {a} and {b} differ by more than {tol}")


def folder(name=""):
    """A path in a folder of this test's own, which is removed when the test ends. The path itself is not created."""
    global _folder
    with _folder_lock:  # tests start programs from several threads
        if _folder is None:
            _folder = tempfile.mkdtemp(prefix="moe-test-")
    return os.path.join(_folder, name) if name else _folder


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, content):
    """Writes text or bytes and returns the path; folders on the way are made."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
    return path


class Result:
    """How a program ended: exit code (128 + n if signal n ended it), what it printed."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


def run(command, code=0, input=None, env=None, cwd=ROOT, timeout=600):
    """Runs a program from the repository's root, fails the test if its exit code is not `code` (None: any)."""
    command = [str(c) for c in command]
    full_env = dict(os.environ, **(env or {}))
    try:
        p = subprocess.run(
            command,
            input=input.encode() if isinstance(input, str) else input,
            capture_output=True,
            env=full_env,
            cwd=cwd,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{' '.join(command)}: still running after {timeout} s")
    r = Result(
        p.returncode if p.returncode >= 0 else 128 - p.returncode,
        p.stdout.decode(errors="replace"),
        p.stderr.decode(errors="replace"),
    )
    if code is not None and r.code != code:
        tail = (r.err or r.out).strip()[-600:]
        raise Failure(f"{' '.join(command)}: exit code {r.code}, not {code}: {tail}")
    return r


def start(command, env=None, cwd=ROOT):
    """Starts a program and returns the Popen object (stdout and stderr piped, as text)."""
    return subprocess.Popen(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=dict(os.environ, **(env or {})),
    )


def expect_error(command, *parts, **options):
    """The program must end with exit code 1 and one line on stderr that contains every part. Returns the line."""
    r = run(command, code=None, **options)
    lines = r.err.splitlines()
    name = " ".join(str(c) for c in command)
    check(r.code == 1, f"{name}: exit code {r.code}, not 1; stderr: {r.err.strip()[-600:]}")
    check(len(lines) == 1, f"{name}: {len(lines)} lines on stderr, not one: {r.err.strip()[-600:]}")
    for part in parts:
        check(part in lines[0], f'{name}: "{lines[0]}" does not contain "{part}"')
    return lines[0]


def main():
    """Runs the tests of the calling file, prints the sum and exits: 0 if none failed."""
    global _folder
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = 0
    for function in _tests:
        if part not in function.__name__:
            continue
        try:
            function()
            passed += 1
            print(f"ok   {function.__name__}", flush=True)
        except Exception as e:
            failed += 1
            at = traceback.extract_tb(e.__traceback__)
            place = next((f for f in reversed(at) if os.path.basename(f.filename) != "harness.py"), at[-1])
            reason = str(e) if isinstance(e, Failure) else f"{type(e).__name__}: {e}"
            print(f"FAIL {function.__name__}: {os.path.basename(place.filename)}:{place.lineno} {reason}", flush=True)
        finally:
            if _folder is not None:
                shutil.rmtree(_folder, ignore_errors=True)
                _folder = None
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


signal.signal(signal.SIGPIPE, signal.SIG_DFL)
