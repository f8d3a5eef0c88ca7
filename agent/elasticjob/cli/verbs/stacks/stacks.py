"""`elasticjob stacks`: where all ranks are now. Workers dump their stacks on the signal that agents use for hangs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import elasticjob
from elasticjob._runtime.agent.monitoring.progress.hangs import StackDump, users_frames
from elasticjob._runtime.contract.names import Role
from elasticjob._runtime.contract.text import printable, with_noun
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError
from elasticjob.cli.cluster.resources import ELASTICJOBS, POD_LIST, KubeObject
from elasticjob.cli.objects.pods import has_log, in_order, is_active, main_container, pod_name, pods_selector
from elasticjob.cli.verbs.logs.logs import PodChoice
from elasticjob.cli.verbs.status import Ranks, ranks_by_pod
from elasticjob.cli.views.output import VerbOutput, without_empty
from elasticjob.cli.views.style import Painter

_PYTHON = re.compile(r"python[0-9.]*")
_THREAD = re.compile(r"^(Current t|T)hread 0x\S+( \[[^\]]*\])?[^\n]*$", re.MULTILINE)
_POD_PATH = re.compile(
    r'^(  File ")[^"]*?/elasticjob(?=/(_runtime|training|inprocess|frameworks|data)/)/', re.MULTILINE
)
_OWN_FOLDER = Path(elasticjob.__file__).parent
AT_ONCE = 8
NO_HANDLER = (
    "no worker of {job} can dump its stacks. Set spec.hangPolicy, for example {{progressTimeoutSeconds: 600, action:"
    " Event}}, which ends nothing. It applies from the next round on: if the job hangs now, delete one of its worker"
    " pods, and ask again once it hangs again"
)


def show_stacks(cluster: Cluster, output: VerbOutput, name: str, pods: Sequence[str], *, all_threads: bool) -> int:
    """Show the stacks of all workers, or of those in some pods; return the exit code: 1 if a pod could not be asked."""
    views, problems = ask_workers(cluster, name, pods)
    for problem in problems:
        output.note(f"elasticjob stacks: {problem}")
    output.show(views, lambda painter: stack_lines(views, painter, all_threads=all_threads))
    return int(bool(problems))


def ask_workers(cluster: Cluster, name: str, pods: Sequence[str]) -> tuple[list[dict[str, Any]], list[Exception]]:
    """Return (what the workers have dumped, by rank; what went wrong in pods that could not be asked).

    `pods`: only these, by name or index; empty: all. ClusterError: none of them runs, or no worker can dump its stacks.
    """
    cluster.get(ELASTICJOBS, name)
    found = in_order(cluster.list(POD_LIST, pods_selector(name, Role.WORKER)))
    asked = [pod for pod in found if is_active(pod) and has_log(pod) and PodChoice(pods).has_pod(pod)]
    if pods and not asked:
        raise ClusterError(f"{name} has no running pod {' or '.join(pods)}: elasticjob status {name} shows its pods")
    if not asked:
        raise ClusterError(f"no worker pod of {name} runs: elasticjob why {name}")
    ranks = ranks_by_pod(cluster, asked)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda pod: _ask(cluster, pod), asked))
    problems = [answer for answer in answers if isinstance(answer, Exception)]
    views: list[dict[str, Any]] = []
    for pod, answer in zip(asked, answers, strict=True):
        if isinstance(answer, str):
            views += stack_views(pod, answer, ranks)
    if not views and not problems:
        raise ClusterError(NO_HANDLER.format(job=name))
    return sorted(views, key=lambda view: (view.get("rank", 1 << 30), view["pod"], view["localRank"])), problems


def _ask(cluster: Cluster, pod: KubeObject) -> str | Exception:
    """Return what the script in the pod writes, or why it could not be run."""
    script = resources.files("elasticjob.cli.verbs.stacks").joinpath("dump_in_pod.py").read_text(encoding="utf-8")
    container = main_container(pod)
    command = next((c.get("command") for c in pod["spec"]["containers"] if c["name"] == container), None) or [""]
    # The agent runs by this Python, so that the image has it.
    python = command[0] if _PYTHON.fullmatch(command[0].rpartition("/")[2]) else "python3"
    try:
        return cluster.execute(pod_name(pod), container, [python, "-c", script])
    except Exception as error:  # of one pod: the others are shown all the same
        return error if isinstance(error, ClusterError) else ClusterError(f"pod {pod_name(pod)}: {error!r}")


def stack_views(pod: KubeObject, answer: str, ranks: Ranks) -> list[dict[str, Any]]:
    """Return what the workers of a pod have dumped. Pure."""
    first = ranks.get(pod_name(pod), (None, None))[0]
    views = []
    for line in answer.splitlines():
        if not line.startswith('{"localRank"'):
            continue  # a warning of the image's Python
        worker = json.loads(line)
        rank = None if first is None else first + worker["localRank"]
        views.append({"pod": pod_name(pod), **without_empty({"rank": rank}), **without_empty(worker)})
    return views


def stack_lines(views: Sequence[dict[str, Any]], painter: Painter, *, all_threads: bool) -> Iterator[str]:
    """Yield the stacks, those of ranks at the same place once. Pure."""
    for number, (there, place) in enumerate(stack_groups(views, all_threads=all_threads)):
        if number:
            yield ""
        yield painter.paint(f"{with_noun(len(there), 'worker')}: {', '.join(there[:16])}", "bold")
        yield from (f"  {line}" for line in place.splitlines())


def stack_groups(views: Sequence[dict[str, Any]], *, all_threads: bool) -> list[tuple[list[str], str]]:
    """Return (workers, their stack) for each place, that of the fewest workers first. Pure."""
    places: dict[str, list[str]] = {}
    for view in views:
        places.setdefault(_place(view, all_threads=all_threads), []).append(_name(view))
    return [(there, printable(place)) for place, there in sorted(places.items(), key=lambda item: len(item[1]))]


def _name(view: dict[str, Any]) -> str:
    where = f"rank {view['rank']}" if "rank" in view else f"local rank {view['localRank']}"
    return f"{where} ({view['pod']})"


def _place(view: dict[str, Any], *, all_threads: bool) -> str:
    """Return the stack of the main thread without elasticjob's own frames, or all threads; without their addresses."""
    if "stacks" not in view:
        return f"writes no stacks; the state of the process is: {view.get('state', 'unknown')}"
    stacks = str(view["stacks"])
    text = stacks if all_threads else users_frames(_without_our_path(StackDump(0, None, 0.0, stacks).main_thread))
    return _THREAD.sub(r"\1hread\2:", text).rstrip()


def _without_our_path(stack: str) -> str:
    """Return a stack in which elasticjob's files in the pod have the paths of this installation, so that they are known
    as its own."""
    return _POD_PATH.sub(lambda match: f"{match[1]}{_OWN_FOLDER}/", stack)
