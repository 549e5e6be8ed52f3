"""Stands in for `python -m tierkv.evaluation`: says what a test put into the environment, and does not run a model."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

request = sys.stdin.buffer.read()
Path(os.environ["STAND_IN_REQUEST"]).write_bytes(request)
sys.stdout.buffer.write(Path(os.environ["STAND_IN_SAYS"]).read_bytes())
sys.stdout.flush()
match os.environ.get("STAND_IN_THEN", ""):
    case "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case "fails":
        raise ValueError("something of the library's")
    case "waits":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(os.environ["STAND_IN_REQUEST"] + ".pid").write_text(str(os.getpid()))
        time.sleep(600)
