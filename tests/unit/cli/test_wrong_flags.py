"""A wrong flag is found before a cluster is chosen: exit code 64, and a message that says what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob.cli import main
from elasticjob.cli.arguments import command_parser

A_JOB = {"scale": ["bert", "3"], "drain": ["bert-0-0"], "submit": ["train.py", "--image", "torch:2.6"]}
"""What each verb needs besides the flag in question; else the name of a job."""
NAME = "want the name of a {} (a-z, 0-9 and '-'), such as "
WRONG: dict[tuple[str, str], tuple[list[str], str]] = {
    **{("", flag): ([flag, value], text) for flag, value, text in (
        ("--namespace", "Team_A", NAME.format("namespace") + "team, got 'Team_A'"),
        ("--context", "typo", "--context typo: "),
        ("--kubeconfig", "none", "--kubeconfig none: there is no such file"),
        ("--timeout", "5", "--timeout is the time of --wait: write both, or none"),
        ("--output", "text", "choose from"),
    )},
    ("", "job"): (["ej/bert"], NAME.format("job") + "bert, got 'ej/bert'"),
    ("scale", "replicas"): (["bert", "0"], "want a number from 1 to 4096, got '0'"),
    ("drain", "pod"): (["pod/bert-0-0"], NAME.format("pod") + "bert-0-0, got 'pod/bert-0-0'"),
    ("logs", "--rank"): (["--rank", "0-3"], "want a number from 0 on, got '0-3'"),
    ("logs", "--pod"): (["--pod", "bert_0"], NAME.format("pod") + "bert-0-0, got 'bert_0'"),
    ("stacks", "--pod"): (["--pod", ""], NAME.format("pod") + "bert-0-0, got ''"),
    ("logs", "--round"): (["--round", "last"], "want a round, such as 3 or 1.0.3, got 'last'"),
    ("logs", "--tail"): (["--tail", "-1"], "want a number from 0 on, got '-1'"),
    ("ui", "--port"): (["--port", "70000"], "want a port from 0 to 65535, got '70000'"),
    ("submit", "script"): (["none.py", "--image", "torch:2.6"], "none.py: there is no such file"),
    ("submit", "--image"): (["--image", "my image"], "want an image, as in registry.example.com/torch:2.6"),
    ("submit", "--code"): (["--code", "none"], "there is no such folder"),
    ("submit", "--name"): (["--name", "Bert"], "--name Bert: want a letter, then a-z, 0-9 and '-', at most 50 in all"),
    ("submit", "--pods"): (["--pods", "0"], "--pods 0: want a number from 1 to 4096"),
    ("submit", "--min-pods"): (["--min-pods", "2"], "--pods 1 is not between --min-pods 2 and --max-pods 1: change"),
    ("submit", "--max-pods"): (["--max-pods", "5000"], "--max-pods 5000: want a number from 1 to 4096"),
    ("submit", "--gpus"): (["--gpus", "65"], "a pod has at most 64 workers"),
    ("submit", "--workers"): (["--workers", "0"], "--workers 0: want a number from 1 to 64"),
    ("submit", "--cpu"): (["--cpu", "4Gi"], "--cpu 4Gi: want a number of CPUs, as in 4 or 500m"),
    ("submit", "--memory"): (["--memory", "16GB"], "--memory 16GB: want a size, as in 16Gi or 500Mi"),
    ("submit", "--env"): (["--env", "A"], "--env A: want NAME=VALUE, as in LOG_LEVEL=debug"),
    ("submit", "--pvc"): (["--pvc", "data"], "--pvc data: want CLAIM:/path, or CLAIM:/path:ro to mount it read-only"),
    ("submit", "--image-pull-secret"): (["--image-pull-secret", "my key"], "want a-z, 0-9, '-' and '.', as in my-data"),
    ("submit", "--update"): (["--update", "ej/bert"], NAME.format("job") + "bert, got 'ej/bert'"),
}  # fmt: skip
"""A wrong value of each flag, by verb; without a verb, of all verbs that have the flag."""
OTHERS = [
    (["submit", "train.py"], "say which SCRIPT to run and in which --image, or which job to --update"),
    (["submit", "--update", "bert", "--pods", "2", "--", "--lr"], "changes nothing but the code: leave out --pods, --"),
    (["submit", "--update", "bert", "--dry-run"], "leave out --dry-run"),
    (["submit", "train.py", "--image", "i", "--lr", "1"], "--lr 1: arguments of the script follow --"),
    (["submit", "train.py", "--image", "i", "--memory", "512m"], "want a size"),
    (["submit", "train.py", "--image", "i", "-e", "RANK=1"], "--env RANK: leave it out, elasticjob sets it"),
    (["submit", "train.py", "--image", "i", "-e", "A B=1"], "want a name of letters"),
    (["submit", "train.py", "--image", "i", "-e", "A=1", "-e", "A=2"], "A has the value '1' already"),
    (["submit", "train.py", "--image", "i", "--name", "a-rdzv"], "metadata.name must not end in -rdzv"),
    (["status", "bert", "-A"], "-A shows all jobs: leave out JOB, or name its namespace with -n"),
    (["logs", "bert", "-f", "-p"], "choose one"),
    (["logs", "bert", "--store", "--rank", "0"], "leave out --rank and --round, or --store"),
    (["why", "bert", "--pod", "0"], "why: unrecognized arguments: --pod 0: elasticjob why --help lists all"),
]


def verbs_of_a_cluster() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    (subcommands,) = (a for a in command_parser("p", "1")._actions if isinstance(a, argparse._SubParsersAction))
    for verb, parser in subcommands.choices.items():
        if any("--kubeconfig" in action.option_strings for action in parser._actions):
            yield verb, parser


def wrong_flags() -> list[tuple[str, str, list[str], str]]:
    """Return verb, flag, what follows the verb, and the message, for each flag of each verb that has a value."""
    found = []
    for verb, parser in verbs_of_a_cluster():
        for action in parser._actions:
            flag = max(action.option_strings, key=len, default=action.dest)
            if action.nargs == 0:
                continue
            arguments, text = WRONG.get((verb, flag)) or WRONG[("", flag)]
            required = verb not in ("status", "events", "ui") and action.option_strings and flag != "--update"
            found.append((verb, flag, [*(A_JOB.get(verb, ["bert"]) if required else []), *arguments], text))
    return found


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script, and a kubeconfig of a cluster that nobody may ask."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config").write_text(
        "contexts: [{name: here, context: {cluster: c, user: u}}]\ncurrent-context: here\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def ended(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(("verb", "flag", "arguments", "text"), wrong_flags())
def test_each_flag_is_checked(
    capsys: pytest.CaptureFixture[str], verb: str, flag: str, arguments: list[str], text: str
) -> None:
    assert (ended([verb, *arguments]), flag) == (64, flag)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "text"), OTHERS)
def test_flags_that_do_not_go_together(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert ended(arguments) == 64
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "image", ["torch", "a.example:5000/me/torch:2.6", "[::1]:5000/t", "t@sha256:" + "0" * 64, "me/my_torch--x:A.b-c"]
)
def test_right_images(capsys: pytest.CaptureFixture[str], image: str) -> None:
    assert ended(["submit", "train.py", "--image", image, "--dry-run"]) == 0
    assert f"image: '{image}'" in capsys.readouterr().out.replace(f"image: {image}", f"image: '{image}'")
