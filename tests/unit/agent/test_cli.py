"""The command line: help and errors."""

from __future__ import annotations

import pytest

from elasticjob import __version__
from elasticjob._runtime.contract.names import Env
from elasticjob.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"elasticjob {__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["run"], "the following arguments are required: manifest"),
        (["agent"], "the command must follow `--`, for example: elasticjob agent -- python train.py"),
        (["agent", "--"], "the command must follow `--`"),
    ],
)
def test_wrong_arguments_exit_64(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 64
    assert message in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "elasticjob agent -- python train.py" in capsys.readouterr().out


def test_an_agent_without_its_environment_names_the_missing_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(Env.STORE_ENDPOINT, raising=False)
    assert main(["agent", "--", "true"]) == 64
    assert "elasticjob agent: ELASTICJOB_STORE_ENDPOINT is not set" in capsys.readouterr().err


def test_a_missing_manifest_exits_64(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/no/such.yaml"]) == 64
    assert "elasticjob run: /no/such.yaml: No such file or directory" in capsys.readouterr().err
