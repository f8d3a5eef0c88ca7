"""The command `elasticjob-operator`."""

from __future__ import annotations

import signal
import sys
from types import ModuleType

import pytest

from elasticjob_operator import command


def test_sigterm_ends_an_operator_that_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elasticjob_operator.__main__")

    def run() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 1

    module.__dict__["main"] = run
    monkeypatch.setitem(sys.modules, "elasticjob_operator.__main__", module)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 0
